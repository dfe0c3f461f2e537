"""Configs of Lightning, from Hydra and from LightningCLI, as recipes."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.foreign.adopt import Adoption
from pipeline.config.foreign.lightning import adopt_lightning, is_lightning
from pipeline.core.errors import RecipeError
from pipeline.core.files.safe_yaml import parse_yaml
from pipeline.training.optimizers.first_order import Adam, Momentum
from tests.config.foreign.files import HYDRA, LIGHTNING_CLI
from tests.config.foreign.rows import (
    count_leaves,
    find_conflicts,
    list_rows,
    require_a_row_each,
    write_recipe,
)
from tests.whole_run import run

CONFIGS = {"hydra": HYDRA, "command line": LIGHTNING_CLI}
EVALUATED = ("data.batch_size.val.batch_size", "is for evaluations")
TINY = ("dataset=digits", "dataset.root=null", "train.epochs=1", "model=mlp", "model.hidden=[8]")


def adopt_config(text: str, **changes: Any) -> Adoption:
    """Map a config, with values by dotted path, whose dots are written as __."""
    tree = deepcopy(parse_yaml(text))
    for path, value in changes.items():
        *sections, key = path.split("__")
        section = tree
        for name in sections:
            section = section[name]
        section[key] = value
    return adopt_lightning("a file", tree)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_value_has_a_row(name: str) -> None:
    adoption = adopt_config(CONFIGS[name])
    require_a_row_each(adoption)
    assert len(adoption.settings) == count_leaves(parse_yaml(CONFIGS[name]))
    assert not list(find_conflicts(adoption))


@pytest.mark.medium
def test_values_of_hydra_are_in_the_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, adopt_config(HYDRA))
    train = recipe.train
    assert (train.epochs, train.batch_size, train.accumulate_steps) == (3, 256, 2)
    assert isinstance(train.optimizer, Adam)
    assert (train.optimizer.lr, train.clip.norm, train.precision) == (0.002, 0.5, "O1")
    assert train.loss_scale.model_dump()["init"] == 65536
    assert (recipe.seed, recipe.dataset.name, recipe.device.name) == (12345, "mnist", "cpu")
    plateau = train.callbacks[0].model_dump()
    # PyTorch's counts evaluations beyond its patience.
    assert (plateau["metric"], plateau["factor"], plateau["patience"]) == ("loss", 0.2, 11)
    stop = recipe.monitor.early_stop
    assert (stop.metric, stop.patience) == ("accuracy", 7)
    assert (recipe.checkpoint.best, recipe.checkpoint.keep) == ("accuracy", 2)
    assert recipe.eval.every_epochs == 2


@pytest.mark.medium
def test_values_of_the_command_line_are_in_the_recipe(tmp_path: Path) -> None:
    adoption = adopt_config(LIGHTNING_CLI)
    recipe = write_recipe(tmp_path, adoption)
    train = recipe.train
    # 64 for each of two devices.
    assert (train.epochs, train.batch_size, train.precision) == (20, 128, "bf16")
    assert isinstance(train.optimizer, Momentum)
    assert (train.optimizer.momentum, train.optimizer.nesterov) == (0.9, True)
    assert train.optimizer.weight_decay == 0.0005
    assert recipe.model.name == "resnet"
    assert (recipe.checkpoint.every_steps, recipe.checkpoint.best) == (100, None)
    assert recipe.eval.every_epochs == 1
    second = list_rows(adoption)["trainer.callbacks.2.class_path"]
    assert second.note == "trainer.callbacks.1.class_path is used; a recipe has one"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "arguments", "factors"),
    [
        ("CosineAnnealingLR", {"T_max": 4, "eta_min": 0.01}, [1, 0.868198, 0.55, 0.231802]),
        ("StepLR", {"step_size": 2}, [1, 1, 0.1, 0.1]),
        ("ExponentialLR", {"gamma": 0.5}, [1, 0.5, 0.25, 0.125]),
        ("PolynomialLR", {"total_iters": 4, "power": 2.0}, [1, 0.5625, 0.25, 0.0625]),
        ("OneCycleLR", {"max_lr": 3.0}, [1, 1, 1, 1]),
    ],
)
def test_rates_are_those_of_pytorch(
    name: str, arguments: dict[str, Any], factors: list[float], tmp_path: Path
) -> None:
    """The first rates of four epochs, by the formulas of PyTorch's documentation."""
    schedule = {"class_path": f"torch.optim.lr_scheduler.{name}", "init_args": arguments}
    adoption = adopt_config(LIGHTNING_CLI, lr_scheduler=schedule, trainer__max_epochs=4)
    train = write_recipe(tmp_path, adoption).train
    table = train.schedule.table(train.optimizer.lr, 4 * 5, 5)
    np.testing.assert_allclose(table[::5], 0.1 * np.array(factors), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"max_epochs": None}, {"train.epochs": 1000}),
        ({"max_epochs": -1, "max_steps": 7}, {"train.steps": 7}),
        ({"max_epochs": None, "max_steps": 7}, {"train.steps": 7}),
        ({"max_epochs": 2, "max_steps": 7}, {"train.epochs": 2}),
        ({"max_epochs": "${paths.mine}"}, {"train.epochs": 1}),
        ({"devices": [0, 1, 2]}, {"train.batch_size": 64 * 3}),
        ({"devices": "0, 1"}, {"train.batch_size": 64 * 2}),
        ({"devices": "0,"}, {"train.batch_size": 64}),
        ({"max_epochs": None, "max_time": "00:01:00:00"}, {"train.epochs": 1}),
        ({"devices": "4", "num_nodes": 2}, {"train.batch_size": 64 * 8}),
        ({"devices": "auto"}, {"train.batch_size": 64}),
        ({"gradient_clip_val": 3, "gradient_clip_algorithm": "value"}, {"train.clip.value": 3}),
        ({"val_check_interval": 30, "accumulate_grad_batches": 3}, {"eval.every_steps": 10}),
        ({"precision": 32}, {"train.precision": "O0"}),
        ({"accelerator": "gpu"}, {"device": "gpu"}),
    ],
)
def test_trainer_sets_keys(changes: dict[str, Any], keys: dict[str, Any]) -> None:
    trainer = parse_yaml(LIGHTNING_CLI)["trainer"] | changes
    found = {
        k: v
        for row in adopt_config(LIGHTNING_CLI, trainer=trainer).rows
        for k, v in row.keys.items()
    }
    assert found.items() >= keys.items()
    lengths = {"train.epochs", "train.steps"}.intersection(found)
    assert len(lengths) == 1


@pytest.mark.parametrize(
    ("changes", "setting", "note"),
    [
        ({"trainer__precision": "64-true"}, "trainer.precision", "there is no such precision"),
        (
            {"trainer__val_check_interval": 0.25},
            "trainer.val_check_interval",
            "is a share of an epoch",
        ),
        ({"trainer__max_steps": 9}, "trainer.max_steps", "training ends with its epochs"),
        (
            {"callbacks__early_stopping__monitor": "val/dice"},
            "callbacks.early_stopping.monitor",
            "evaluations have no such metric",
        ),
        (
            {"callbacks__early_stopping__mode": "min"},
            "callbacks.early_stopping.monitor",
            "accuracy is better if it is max",
        ),
        ({"seed": True}, "seed", "is no number: Lightning draws a seed"),
        ({"seed": "???"}, "seed", "is ???: not set"),
        ({"seed": "${tags}", "tags": None}, "seed", "has a reference that isn't followed"),
        ({"data__batch_size": None}, "data.batch_size", "has no value"),
        ({"data__batch_size": {"val": {"batch_size": 9}}}, *EVALUATED),
        ({}, "model.net.input_size", "is an argument of SimpleDenseNet"),
        ({}, "model.net._target_", "is code"),
        ({}, "paths.output_dir", "has a reference"),
        ({}, "data.num_workers", "this project's loader"),
        ({}, "trainer.epochs_of_mine", "is an argument of Trainer"),
        ({"mystery": 7}, "mystery", "has no counterpart in a recipe"),
    ],
)
def test_unmapped_setting_has_its_reason(changes: dict[str, Any], setting: str, note: str) -> None:
    row = list_rows(adopt_config(HYDRA, **changes))[setting]
    assert not row.keys
    assert row.note.startswith(note)


def test_steps_between_validations_replace_epochs() -> None:
    rows = list_rows(adopt_config(HYDRA, trainer__val_check_interval=20)).values()
    keys = {key: value for row in rows for key, value in row.keys.items()}
    assert keys["eval.every_steps"] == 10
    assert "eval.every_epochs" not in keys


def test_batch_size_of_training_is_preferred() -> None:
    sizes = {"all": {"batch_size": 5}, "train": {"batch_size": 7}}
    rows = list_rows(adopt_config(HYDRA, data__batch_size=sizes))
    assert rows["data.batch_size.train.batch_size"].keys == {"train.batch_size": 14}
    assert not rows["data.batch_size.all.batch_size"].keys


def test_end_of_a_schedule_is_relative_to_the_optimizer() -> None:
    tree = parse_yaml(LIGHTNING_CLI)
    model = {**tree["model"]["init_args"], "lr": 5.0}
    rows = list_rows(adopt_config(LIGHTNING_CLI, model__init_args=model))
    row = rows["lr_scheduler.init_args.eta_min"]
    assert row.keys == {"train.schedule.end_factor": pytest.approx(0.01)}


@pytest.mark.parametrize(
    "arguments",
    [
        {"every_n_epochs": 0},
        {"save_top_k": 0, "monitor": "val_loss", "every_n_epochs": 3},
        {"train_time_interval": {"class_path": "datetime.timedelta", "init_args": {"hours": 1}}},
        {"train_time_interval": "1:00:00"},
    ],
)
def test_checkpoint_without_a_period_has_no_key(arguments: dict[str, Any]) -> None:
    callback = {"class_path": "ModelCheckpoint", "init_args": arguments}
    adoption = adopt_config(LIGHTNING_CLI, trainer__callbacks=[callback])
    require_a_row_each(adoption)
    assert not [key for row in adoption.rows for key in row.keys if key.startswith("checkpoint.")]


def test_second_optimizer_is_named() -> None:
    discriminator = {"_target_": "torch.optim.RMSprop", "lr": 3.0, "alpha": 0.5}
    rows = list_rows(adopt_config(HYDRA, model__second=discriminator))
    assert (
        rows["model.second._target_"].note == "model.optimizer._target_ is used; a recipe has one"
    )
    assert not rows["model.second.lr"].keys
    assert rows["model.optimizer.lr"].keys == {"train.optimizer.lr": 0.002}


def test_values_that_conflict_have_one_key_and_a_note() -> None:
    rows = list_rows(adopt_config(HYDRA, seed_everything=3))
    assert rows["seed"].keys == {"seed": 12345}
    assert (rows["seed_everything"].keys, rows["seed_everything"].note) == ({}, "seed sets seed")


def test_secret_is_not_shown() -> None:
    settings = adopt_config(HYDRA, task_name="${logger.wandb.api_key}").settings
    assert settings["logger.wandb.api_key"] == "(hidden)"
    assert "key-of-mine" not in str(settings)


def test_reference_within_the_file_is_followed() -> None:
    rows = list_rows(adopt_config(HYDRA, data__batch_size="${data.size}", data__size=48))
    assert rows["data.batch_size"].keys == {"train.batch_size": 96}
    circle = adopt_config(HYDRA, seed="${tags}", tags="${seed}")
    assert list_rows(circle)["seed"].note == "has a reference that isn't followed"


def test_subcommand_of_the_command_line_is_entered() -> None:
    tree = parse_yaml(LIGHTNING_CLI)
    assert adopt_lightning("", {"fit": tree}).rows == adopt_lightning("", tree).rows


def test_key_with_a_dot_is_no_path() -> None:
    rows = list_rows(adopt_config(HYDRA, **{"trainer.max_epochs": 9}))
    assert not rows["'trainer.max_epochs'"].keys
    twice = {"x": {"'a": {"b'": 1}, "a.b": 2}}
    with pytest.raises(RecipeError, match=r"x\.'a\.b': is there twice, by a key with a dot"):
        adopt_lightning("", twice)


def test_other_yaml_is_not_lightnings() -> None:
    assert not any(map(is_lightning, ({}, [1], None, "text", {"train": {"steps": 3}})))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_epochs": "many"}, "trainer.max_epochs = many: must be a number"),
        ({"num_nodes": [2]}, "trainer.num_nodes = .*: must be a number"),
        ({"gradient_clip_val": True}, "trainer.gradient_clip_val = true: must be a number"),
    ],
)
def test_wrong_value_is_refused(changes: dict[str, Any], problem: str) -> None:
    trainer = parse_yaml(LIGHTNING_CLI)["trainer"] | changes
    with pytest.raises(RecipeError, match=problem):
        adopt_config(LIGHTNING_CLI, trainer=trainer)


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    st.lists(st.integers(), max_size=3),
    st.sampled_from(["${seed}", "16", "-1", "0,1", "val_loss"]),
)
PATHS = [
    *("seed", "data__batch_size", "model__optimizer__lr", "model__optimizer__betas"),
    *("model__scheduler__patience", "trainer__max_epochs", "trainer__max_steps"),
    *("trainer__devices", "trainer__precision", "trainer__val_check_interval", "new.key"),
    *("trainer__accumulate_grad_batches", "callbacks__early_stopping__monitor"),
    *("callbacks__model_checkpoint__save_top_k", "model__optimizer___target_", "data"),
]


@pytest.mark.medium
@given(st.dictionaries(st.sampled_from(PATHS), VALUES))
@settings(max_examples=200, deadline=None)
def test_accepted_config_has_one_row_per_setting(changes: dict[str, Any]) -> None:
    changes = {"data": changes["data"]} if "data" in changes else changes
    try:
        adoption = adopt_config(HYDRA, **changes)
    except RecipeError:
        return
    require_a_row_each(adoption)
    assert not list(find_conflicts(adoption))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_adopted_config_trains(name: str, tmp_path: Path, cache: Path) -> None:
    recipe = write_recipe(tmp_path, adopt_config(CONFIGS[name]), *TINY, f"cache.root={cache}")
    assert run(recipe, tmp_path / "run").status == "done"
