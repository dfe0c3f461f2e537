"""JSON files of TrainingArguments as recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.foreign.adopt import Adoption
from pipeline.config.foreign.training_arguments import (
    adopt_training_arguments,
    read_training_arguments,
)
from pipeline.core.errors import RecipeError
from pipeline.training.optimizers.first_order import AdamW
from tests.config.foreign.files import TRAINING_ARGUMENTS
from tests.config.foreign.rows import (
    count_leaves,
    find_conflicts,
    list_keys,
    list_rows,
    require_a_row_each,
    write_recipe,
)
from tests.whole_run import run


def adopt_arguments(**changes: Any) -> Adoption:
    return adopt_training_arguments("a file", {**TRAINING_ARGUMENTS, **changes})


def test_every_value_has_a_row() -> None:
    adoption = adopt_arguments()
    require_a_row_each(adoption)
    assert len(adoption.settings) == count_leaves(TRAINING_ARGUMENTS)
    assert not list(find_conflicts(adoption))
    assert list_rows(adoption)["mystery"].note == "has no counterpart in a recipe"
    assert adoption.settings["hub_token"] == "(hidden)"


@pytest.mark.medium
def test_values_are_in_the_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, adopt_arguments())
    train = recipe.train
    assert (train.epochs, train.batch_size, train.accumulate_steps) == (3, 32, 2)
    assert isinstance(train.optimizer, AdamW)
    assert (train.optimizer.lr, train.optimizer.b2, train.optimizer.weight_decay) == (
        5e-5,
        0.95,
        0.01,
    )
    assert [rule.weight_decay for rule in train.optimizer.decay_rules] == [0, 0]
    assert (train.clip.norm, train.precision, recipe.seed) == (1.0, "bf16", 42)
    loss = train.loss.model_dump()
    assert (loss["smoothing"], loss["smoothing_convention"]) == (0.1, "uniform")
    assert (recipe.eval.every_steps, recipe.checkpoint.every_steps) == (50, 500)
    assert (recipe.checkpoint.best, recipe.checkpoint.keep) == ("accuracy", 2)
    dataset = recipe.dataset.model_dump()
    assert dataset["eval"]["batch_size"] == 8
    assert dataset["train"]["drop_remainder"] is False


STEPS = 20


def scheduled(kind: str, step: int, warmup: int) -> float:
    """Return the Trainer's factor after `step` updates of 20, by the formulas of transformers."""
    if step < warmup:
        return step / warmup
    share = (step - warmup) / (STEPS - warmup)
    return {
        "linear": 1 - share,
        "cosine": 0.5 * (1 + np.cos(np.pi * share)),
        "cosine_with_min_lr": 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * share)),
        "polynomial": 0.25 + 0.75 * (1 - share) ** 2,
        "constant": 1.0,
        "constant_with_warmup": 1.0,
    }[kind]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_min_lr", {"min_lr": 5e-6}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("polynomial", {"lr_end": 1.25e-5, "power": 2.0}),
        ("constant", {}),
        ("constant_with_warmup", {}),
    ],
)
def test_rates_are_those_of_the_trainer(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    adoption = adopt_arguments(
        lr_scheduler_type=kind, lr_scheduler_kwargs=options, max_steps=STEPS, warmup_ratio=0.2
    )
    train = write_recipe(tmp_path, adoption).train
    assert train.steps == STEPS
    warmup = 0 if kind == "constant" else 4
    table = train.schedule.table(train.optimizer.lr, STEPS, 5)
    expected = [5e-5 * scheduled(kind, step, warmup) for step in range(STEPS)]
    np.testing.assert_allclose(table[warmup:], expected[warmup:], rtol=1e-5)
    # Warmup is one step ahead: the Trainer's first update has rate 0.
    np.testing.assert_allclose(table[: max(warmup - 1, 0)], expected[1:warmup], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"num_train_epochs": 2.5}, {"train.epochs": 3}),
        ({"max_steps": 70}, {"train.steps": 70}),
        ({"_n_gpu": 4}, {"train.batch_size": 128}),
        ({"warmup_steps": 30}, {"train.schedule.warmup_steps": 30}),
        ({"warmup_steps": 0.5, "max_steps": 9}, {"train.schedule.warmup_steps": 5}),
        ({"warmup_ratio": 0.5}, {"train.schedule.warmup_epochs": 1.5}),
        ({"eval_strategy": "epoch"}, {"eval.every_epochs": 1}),
        ({"save_strategy": "epoch"}, {"checkpoint.every_epochs": 1}),
        ({"eval_steps": None}, {"eval.every_steps": 10}),
        ({"metric_for_best_model": None, "greater_is_better": None}, {"checkpoint.best": "loss"}),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau"},
            {"train.callbacks.reduce_on_plateau.patience": 11},
        ),
        ({"fp16": True, "bf16": False}, {"train.precision": "O1"}),
        ({"use_cpu": True}, {"device": "cpu"}),
        ({"gradient_checkpointing": True}, {"train.remat": "blocks"}),
        ({"optim": "sgd", "weight_decay": 0.0}, {"optimizer": "sgd"}),
    ],
)
def test_argument_sets_keys(changes: dict[str, Any], keys: dict[str, Any]) -> None:
    found = list_keys(adopt_arguments(**changes))
    assert found.items() >= keys.items()
    assert len({"train.epochs", "train.steps"}.intersection(found)) == 1


@pytest.mark.parametrize(
    ("changes", "setting", "note"),
    [
        ({"max_steps": 70}, "num_train_epochs", "max_steps is used"),
        ({"optim": "adafactor"}, "optim", "there is no such optimizer"),
        ({"lr_scheduler_type": "inverse_sqrt"}, "lr_scheduler_type", "there is no such schedule"),
        ({"metric_for_best_model": "bleu"}, "metric_for_best_model", "evaluations have no such"),
        ({"greater_is_better": False}, "load_best_model_at_end", "evaluations have no such"),
        ({"eval_steps": 0.1}, "eval_steps", "is a share of the length"),
        ({"lr_scheduler_type": "constant"}, "warmup_ratio", "constant has no warmup"),
        ({"warmup_steps": 3}, "warmup_ratio", "warmup_steps is used"),
        ({"fp16": True}, "fp16", "bf16 sets train.precision"),
    ],
)
def test_unmapped_setting_has_its_reason(changes: dict[str, Any], setting: str, note: str) -> None:
    row = list_rows(adopt_arguments(**changes))[setting]
    assert row.note.startswith(note)
    assert "train.precision" not in row.keys


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"seed": 1,', "line 1 column 12"),
        ('{"seed": 1, "x": {"a": 1, "a": 2}}', "has the key a twice"),
        ('{"seed": ' + "9" * 101 + "}", "has a number of 101 digits"),
        ("[" * 70 + "]" * 70, "is nested too deeply"),
        ("", "Expecting value"),
    ],
)
def test_wrong_json_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "training_args.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_training_arguments(file)


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(["lr_end", "power", "min_lr", "num_cycles"]), st.floats()),
    st.sampled_from(["steps", "epoch", "no", "polynomial", "cosine_with_restarts", "eval_loss"]),
)


@pytest.mark.medium
@given(st.dictionaries(st.sampled_from([*TRAINING_ARGUMENTS, "_n_gpu"]), VALUES))
@settings(max_examples=200, deadline=None)
def test_accepted_file_has_one_row_per_setting(changes: dict[str, Any]) -> None:
    try:
        adoption = adopt_arguments(**changes)
    except RecipeError:
        return
    require_a_row_each(adoption)
    assert not list(find_conflicts(adoption))


@pytest.mark.slow
def test_adopted_file_trains(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "training_args.json"
    file.write_text(json.dumps(TRAINING_ARGUMENTS, indent=2))
    adoption = adopt_training_arguments("a file", read_training_arguments(file))
    small = ("train.epochs=null", "train.steps=3", "train.schedule.warmup_epochs=0.0")
    recipe = write_recipe(tmp_path, adoption, *small, f"cache.root={cache}")
    assert run(recipe, tmp_path / "run").status == "done"
