"""YAMLs of mindcv as recipes, and their training on synthetic images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.config.foreign.adopt import adopt, make_recipe_text
from pipeline.config.foreign.mindcv import RULES
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.training.optimizers.first_order import Momentum
from tests.config.foreign.files import LARGE, MINDCV, SMALL, TRAINED
from tests.conftest import MLP
from tests.slow_cases import mark_slow_except
from tests.whole_run import run


def write_recipe(folder: Path, values: Mapping[str, Any], *overrides: str) -> Recipe:
    """Adopt settings of mindcv, and return the recipe of the file with overrides."""
    file = folder / "adopted.yaml"
    file.write_text(make_recipe_text(adopt("mindcv", "a file", values, RULES), file))
    return load_recipe(str(file), overrides)


@pytest.mark.medium
def test_yaml_values_are_in_the_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, SMALL)
    train = recipe.train
    assert (train.batch_size, train.epochs, train.precision, train.sink) == (16, 2, "O0", True)
    assert isinstance(train.optimizer, Momentum)
    assert (train.optimizer.lr, train.optimizer.weight_decay) == (0.01, 0.0001)
    assert recipe.checkpoint.keep == 3
    assert recipe.eval.every_epochs == 2
    assert recipe.dataset.name == "cifar10"
    assert str(recipe.dataset.root) == "/data/cifar10"
    assert [op.name for op in recipe.dataset.train.ops] == [
        "random_crop",
        "random_horizontal_flip",
        "resize",
        "rescale",
        "normalize",
    ]
    loss = train.loss.model_dump()
    assert (loss["smoothing"], loss["smoothing_convention"]) == (0.1, "uniform")
    scale = train.loss_scale.model_dump()
    assert scale == {"name": "fixed", "scale": 1024, "drop_overflow_update": False}


@pytest.mark.medium
@pytest.mark.parametrize("name", mark_slow_except({"squeezenet_mixup", "densenet121"}, MINDCV))
def test_ten_yamls_become_recipes(name: str, tmp_path: Path) -> None:
    values = MINDCV[name]
    recipe = write_recipe(tmp_path, values)
    assert recipe.train.optimizer.lr == values["lr"]
    assert recipe.train.epochs == values["epoch_size"]


@pytest.mark.slow
def test_imagenet_recipe_has_its_crops(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, MINDCV["mobilenet_v2"])
    dataset = recipe.dataset.model_dump(mode="json")
    assert dataset["name"] == "image_folder"
    assert dataset["image_size"] == [256, 256]
    train = {op["name"]: op for op in dataset["train"]["ops"]}
    assert list(train) == [
        "random_resized_crop",
        "random_horizontal_flip",
        "random_color_adjust",
        "normalize",
    ]
    assert train["random_resized_crop"]["ratio"] == [0.75, 1.333]
    assert train["random_color_adjust"]["contrast"] == [0.6, 1.4]
    assert [op["name"] for op in dataset["eval"]["ops"]] == ["center_crop", "normalize"]
    assert recipe.model.model_dump()["dropout"] == 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "patterns"), [("resnet50", ["*/bias", "*/scale"]), ("vgg16", ["*/bias"])]
)
def test_biases_and_norms_have_no_weight_decay(
    name: str, patterns: list[str], tmp_path: Path
) -> None:
    rules = write_recipe(tmp_path, MINDCV[name]).train.optimizer.decay_rules
    assert [rule.pattern for rule in rules] == patterns


EPOCHS = 6
STEPS_PER_EPOCH = 5
RATES = {"lr": 0.1, "epoch_size": EPOCHS, "warmup_epochs": 0, "decay_rate": 0.5}


def decayed(name: str, epoch: float) -> float:
    """Return mindcv's learning rate after a number of epochs, by the formulas of its functions."""
    return {
        "constant": 0.1,
        "cosine_decay": 0.001 + 0.5 * (0.1 - 0.001) * (1 + np.cos(np.pi * epoch / EPOCHS)),
        "exponential_decay": 0.1 * 0.5**epoch,
        "polynomial_decay": 0.1 * (1 - epoch / EPOCHS) ** 0.5,
        "step_decay": 0.1 * 0.5 ** (int(epoch) // 2),
    }[name]


@pytest.mark.medium
@pytest.mark.parametrize(
    "name",
    mark_slow_except(
        {"step_decay"},
        ["constant", "cosine_decay", "exponential_decay", "polynomial_decay", "step_decay"],
    ),
)
def test_learning_rates_match_mindcv(name: str, tmp_path: Path) -> None:
    values = {**SMALL, **RATES, "scheduler": name, "decay_epochs": 2}
    train = write_recipe(tmp_path, values).train
    table = train.schedule.table(train.optimizer.lr, EPOCHS * STEPS_PER_EPOCH, STEPS_PER_EPOCH)
    expected = [decayed(name, step / STEPS_PER_EPOCH) for step in range(len(table))]
    np.testing.assert_allclose(table, expected, rtol=1e-6)


@pytest.mark.slow
def test_accumulated_batch_is_split_into_microbatches(tmp_path: Path) -> None:
    train = write_recipe(tmp_path, MINDCV["squeezenet_accumulated"]).train
    assert (train.batch_size, train.accumulate_steps) == (16, 2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "cait_s24"}, "model = cait_s24: there is no such network"),
        ({"opt": "adan"}, "opt = adan: must be one of adagrad, adam"),
        ({"dataset": "voc"}, "dataset = voc: must be one of imagenet, cifar10"),
        ({"crop_pct": 0, "dataset": "imagenet"}, "crop_pct = 0: must be from 0.01 to 1"),
        ({"image_resize": 1e308, "dataset": "imagenet"}, r"image_resize = 1e\+308: must be from 1"),
        ({"batch_size": "many"}, "batch_size = many: must be a number"),
        ({"model": 3}, "model = 3: must be text"),
    ],
)
def test_unsupported_setting_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        adopt("mindcv", "a file", {**SMALL, **changes}, RULES)


@pytest.mark.slow
def test_imagenet_without_a_folder_names_the_key_to_set(tmp_path: Path) -> None:
    values = {key: value for key, value in LARGE.items() if key != "data_dir"}
    assert str(write_recipe(tmp_path, values).dataset.root) == "."


def test_unmapped_settings_have_reasons() -> None:
    rows = {row.setting: row for row in adopt("mindcv", "a file", LARGE, RULES).rows}
    assert "cutout" in rows["re_prob"].note
    assert "parallel.mode=data" in rows["distribute"].note
    assert rows["pretrained"].note == "is off"


def test_file_with_mixup_and_cutmix_says_which_is_used() -> None:
    values = {**SMALL, "mixup": 0.2, "cutmix": 1.0}
    rows = {row.setting: row for row in adopt("mindcv", "a file", values, RULES).rows}
    assert rows["mixup"].keys["dataset.train.ops.mix_up.alpha"] == 0.2
    assert not rows["cutmix"].keys
    assert rows["cutmix"].note.startswith("mixup is used: a recipe has one of both")
    alone = {row.setting: row for row in adopt("mindcv", "", {**SMALL, "cutmix": 1.0}, RULES).rows}
    assert alone["cutmix"].keys["dataset.train.ops.cut_mix.alpha"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_five_yamls_train_on_synthetic_images(name: str, tmp_path: Path, cache: Path) -> None:
    """All settings of each; the network is one of mindcv, made small, with the first alone."""
    small = ("model.stem_features=4", "model.squeezes=[2,2]", "model.pool_after=[]")
    network = small if name == TRAINED[0] else MLP
    sizes = ["+dataset.like=cifar10", "+dataset.train_size=32", "+dataset.eval_size=16"]
    overrides = ["dataset.name=synthetic", *sizes, *network, f"cache.root={cache}"]
    summary = run(write_recipe(tmp_path, MINDCV[name], *overrides), tmp_path / "run")
    assert summary.status == "done"
    assert summary.steps == 4
