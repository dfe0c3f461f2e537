"""Host ops: custom Python functions that map samples as they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from pipeline import Trainer, load_recipe
from pipeline.api import ColumnSpec, HostOp, component
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.reporter import Reporter
from pipeline.data.columns import Split, Targets
from pipeline.data.host_ops import HOST_OP, map_on_host, read_epoch_values
from pipeline.data.random import seed_words, uniforms
from pipeline.stages.data import load_data
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.record.trained_run import Samples, TrainedRun
from tests import outcome
from tests.whole_run import run


@component("host_op")
class Shift(HostOp):
    """Adds a number that is drawn for each sample and epoch."""

    name: Literal["test_shift"] = "test_shift"

    @property
    def draws(self) -> int:
        return 1

    def output(self, value: ColumnSpec) -> ColumnSpec:
        return ColumnSpec(value.shape, "float32")

    def __call__(self, value: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        return value.astype(np.float32) + uniforms[0]


@component("host_op")
class Strange(HostOp):
    """Fails, or returns something else than it says."""

    name: Literal["test_strange"] = "test_strange"
    kind: Literal["raises", "shape", "refuses"] = "raises"

    def output(self, value: ColumnSpec) -> ColumnSpec:
        if self.kind == "refuses":
            raise ValueError("needs colours")
        return value

    def __call__(self, value: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        return value[:1] if self.kind == "shape" else value / None  # type: ignore[operator]


def make_split() -> Split:
    return Split({"image": np.arange(24, dtype=np.uint8).reshape(6, 2, 2, 1)})


def test_draws_are_a_function_of_seed_epoch_sample_and_op() -> None:
    column = map_on_host(
        make_split(), [Shift(column="image"), Shift(column="image")], seed=3
    ).columns["image"]
    rows = np.array([4, 1])
    words = seed_words(3)
    for epoch in (0, 2):
        numbers = [uniforms(np, words, epoch, rows, HOST_OP + n, 1)[:, 0] for n in (0, 1)]
        images = make_split().columns["image"][rows].astype(np.float32)
        expected = images + numbers[0][:, None, None, None] + numbers[1][:, None, None, None]
        np.testing.assert_array_equal(read_epoch_values(column, rows, rows, epoch), expected)
    np.testing.assert_array_equal(column[rows], read_epoch_values(column, rows, rows, 0))
    assert read_epoch_values(column, rows[:0], rows[:0], 0).shape == (0, 2, 2, 1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raises", r"host_ops.0 \(test_strange\): sample 0: TypeError: unsupported operand"),
        ("shape", r"sample 0: returned uint8 of shape \(1, 2, 1\); its output is uint8 of shape"),
    ],
)
def test_failed_op_is_named_with_its_sample(kind: Any, message: str) -> None:
    column = map_on_host(make_split(), [Strange(column="image", kind=kind)], seed=3).columns[
        "image"
    ]
    with pytest.raises(DataError, match=message):
        column[np.array([0])]


def make_recipe(*overrides: str) -> Recipe:
    ops = "[{name: resize, size: [32, 32]}, {name: rescale, factor: 0.06, shift: 0.0}]"
    base = [f"dataset.train.ops={ops}", "train.epochs=null", "train.steps=36", "train.sink_size=-1"]
    base += ["schedule=constant"]
    base += ["dataset.train.select=[{name: take, samples: 256}]", "eval.every_epochs=null"]
    return load_recipe("lenet5_digits", [*base, *overrides])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "dataset.train.host_ops=[{name: test_strange, column: image, kind: refuses}]",
            "needs colours",
        ),
        ("dataset.train.host_ops=[{name: test_shift, column: mask}]", "there is no such column"),
        ("dataset.train.select=[{name: take, samples: 0}]", "select.0.samples = 0: must be"),
    ],
)
def test_invalid_recipes_are_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_data(make_recipe(override), Reporter())


def test_resident_feed_is_refused_for_host_ops() -> None:
    recipe = make_recipe(
        "dataset.train.host_ops=[{name: test_shift, column: image}]", "train.feed=resident"
    )
    with pytest.raises(RecipeError, match=r"train.feed = resident: must be auto or stream"):
        load_data(recipe, Reporter())


def test_predictions_refuse_host_ops_of_evaluation() -> None:
    recipe = make_recipe("dataset.eval.host_ops=[{name: test_shift, column: image}]")
    samples = Samples({"image": ColumnSpec((8, 8, 1), "float32")}, Targets(("a", "b")))
    with pytest.raises(RecipeError, match=r"dataset.eval.host_ops: must be \[\] for predictions"):
        make_predict(TrainedRun(recipe, {}, 1, samples))


@pytest.mark.medium
def test_python_batches_have_the_draws_of_their_epoch() -> None:
    recipe = make_recipe("dataset.train.host_ops=[{name: test_shift, column: image}]")
    dataset = load_data(recipe, Reporter())
    first, second = (next(Trainer(recipe).dicts("train", epoch)) for epoch in (0, 1))
    batches = dataset.train_order.batches(dataset.train_order.steps_per_epoch, 1)
    column = dataset.train.columns["image"]
    raw = read_epoch_values(column, batches.rows[0], batches.indices[0], 1)
    np.testing.assert_allclose(second["image"][:, 0, 0, 0], raw[:, 0, 0, 0] * 0.06, rtol=1e-6)
    assert not np.array_equal(first["image"], second["image"])


@pytest.mark.slow
def test_training_is_equal_at_any_sink_and_resumed(cache: Path, tmp_path: Path) -> None:
    quiet = ["monitor.tensorboard=false", "monitor.sample_images=0", f"cache.root={cache}"]
    ops = [
        "dataset.train.host_ops=[{name: test_shift, column: image}]",
        "model=mlp",
        "model.hidden=[16]",
        *quiet,
    ]
    run(make_recipe(*ops, "train.sink=false"), tmp_path / "off")
    for size in (1, 7, 36):
        run(make_recipe(*ops, f"train.sink_size={size}"), tmp_path / f"sink{size}")
        outcome.assert_same_run(tmp_path / "off", tmp_path / f"sink{size}")
    run(make_recipe(*ops, "train.steps=20"), tmp_path / "broken")
    run(make_recipe(*ops, f"train.resume={tmp_path / 'broken'}"))
    assert outcome.metrics(tmp_path / "broken") == outcome.metrics(tmp_path / "off")
