"""Datasets made of others: concat and zip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.data.columns import RawData
from pipeline.stages.data import load_data
from tests import outcome
from tests.whole_run import run

SIZES = {"a": 6, "b": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, (name, size) in enumerate(SIZES.items()):
        images = np.full((size, 4, 4, 1), 100 * number, np.uint8)
        images[:, 0, 0, 0] = np.arange(size)
        labels = (np.arange(size) + number) % 2
        np.savez(
            tmp_path / f"{name}.npz",
            x_train=images,
            y_train=labels,
            x_test=images[:2],
            y_test=labels[:2],
        )
    return tmp_path


def source(folder: Path, name: str) -> str:
    return f"{{name: numpy, root: {folder / name}.npz, classes: 2}}"


def read(*overrides: str) -> RawData:
    base = ["model=mlp", "schedule=constant", "train.steps=1", "train.batch_size=2"]
    recipe = load_recipe(overrides=[*base, *overrides])
    return recipe.dataset.read(Path())


@pytest.mark.medium
def test_concat_reads_sources_in_sequence(folder: Path) -> None:
    raw = read("dataset=concat", f"dataset.sources=[{source(folder, 'a')},{source(folder, 'b')}]")
    images = raw.train.columns["image"][:]
    assert images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert images[:, 1, 1, 0].tolist() == [0] * 6 + [100] * 4
    assert raw.train.columns["label"][:].tolist() == [0, 1, 0, 1, 0, 1, 1, 0, 1, 0]
    assert raw.train.files == (6, 4)
    assert len(raw.eval) == 4


@pytest.mark.medium
def test_source_is_accepted_as_a_name() -> None:
    raw = read("dataset=concat", "dataset.sources=[digits,digits]")
    assert len(raw.train) == 2 * 1438


@pytest.mark.medium
def test_zip_combines_images_and_labels(folder: Path) -> None:
    first, second = source(folder, "a"), source(folder, "b")
    raw = read("dataset=zip", f"dataset.images={first}", f"dataset.labels={second}")
    assert raw.train.columns["image"][:, 1, 1, 0].tolist() == [0] * 4
    assert raw.train.columns["label"][:].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset=concat"], "must have at least one dataset"),
        (["dataset=concat", "dataset.sources=[{name: nump}]"], "sources.0.name = nump: there is"),
        (["dataset=concat", "dataset.sources=[{name: numpy}]"], "sources.0.root: missing"),
        (["dataset=zip"], "dataset.images: must be a dataset"),
        (["dataset=concat", "dataset.root=/data", "dataset.sources=[digits]"], "must be null"),
    ],
)
def test_invalid_combined_sources_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        read(*overrides)


@pytest.mark.slow
def test_sources_with_other_classes_or_shapes_are_refused(folder: Path) -> None:
    with np.load(folder / "b.npz") as arrays:
        other: dict[str, Any] = dict(arrays)
    other.update(x_train=other["x_train"][:, :2], x_test=other["x_test"][:, :2])
    np.savez(folder / "c.npz", **other)
    first = source(folder, "a")
    with pytest.raises(DataError, match=r"image is uint8 of shape \(4, 4, 1\) and uint8 of shape"):
        read("dataset=concat", f"dataset.sources=[{first},{source(folder, 'c')}]")
    third = source(folder, "b").replace("classes: 2", "classes: 3")
    with pytest.raises(DataError, match=r"sources.1: predicts 3 classes, and dataset.sources.0 2"):
        read("dataset=concat", f"dataset.sources=[{first},{third}]")


@pytest.mark.medium
def test_concat_of_series_with_other_means_is_refused(tmp_path: Path) -> None:
    sources = []
    for number in range(2):
        file = tmp_path / f"{number}.npz"
        np.savez(file, series=number + np.arange(40.0).reshape(10, 4), label=np.arange(10) % 2)
        sources.append(f"{{name: series, root: {file}}}")
    joined = f"dataset.sources=[{','.join(sources)}]"
    with pytest.raises(DataError, match=r"sources.1: its series have other means or deviations"):
        read("dataset=concat", joined)
    raw = read("dataset=concat", joined.replace(".npz}", ".npz, standardise: false}"))
    assert (len(raw.train), len(raw.eval)) == (16, 4)


def mixture(folder: Path, *overrides: str) -> RawData:
    sources = f"dataset.sources=[{source(folder, 'a')},{source(folder, 'b')}]"
    return read("dataset=mixture", sources, *overrides)


@pytest.mark.medium
def test_mixture_has_all_samples_and_an_order_by_weights(folder: Path) -> None:
    raw = mixture(folder, "dataset.weights=[3,1]")
    assert raw.train.files == (6, 4)
    overrides = [
        "model=mlp",
        "train.steps=1",
        "train.batch_size=5",
        "dataset=mixture",
        f"dataset.sources=[{source(folder, 'a')},{source(folder, 'b')}]",
        "dataset.weights=[3,1]",
        "dataset.changes=[{after_steps: 200, weights: [0, 1]}]",
    ]
    order = load_data(load_recipe(overrides=overrides)).train_order
    assert (order.batches(0, 200).rows < 6).sum() == 750
    assert (order.batches(200, 9).rows >= 6).all()


@pytest.mark.slow
def test_mixture_has_the_same_bits_in_any_sink_and_after_a_resume(
    folder: Path, cache: Path
) -> None:
    """Weights change within a sink, and after the step at which the run is resumed."""
    changes = "[{after_steps: 5, weights: [0, 1]}, {after_steps: 9, weights: [1, 0]}]"
    overrides = [
        *("model=mlp", "model.hidden=[6]", "schedule=constant", "train.batch_size=3"),
        *("train.steps=12", "optimizer=adam", "train.optimizer.lr=0.01", "dataset=mixture"),
        f"dataset.sources=[{source(folder, 'a')},{source(folder, 'b')}]",
        *("dataset.weights=[3,1]", f"dataset.changes={changes}", "monitor.tensorboard=false"),
        f"cache.root={cache}",
    ]
    variants = {"whole": [], "sinks": ["train.sink_size=7"], "part": ["train.end_step=7"]}
    for name, more in variants.items():
        run(load_recipe(overrides=[*overrides, *more]), folder / name)
    run(load_recipe(overrides=[*overrides, f"train.resume={folder / 'part'}"]))
    whole = outcome.metrics(folder / "whole")
    assert len({line["loss"] for line in whole}) == 12
    for name in ("sinks", "part"):
        assert outcome.metrics(folder / name) == whole
        outcome.assert_equal_arrays(
            outcome.arrays(folder / name, 12), outcome.arrays(folder / "whole", 12)
        )


@pytest.mark.medium
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["dataset.weights=[0,0]"],
            r"weights = \[0.0, 0.0\]: must be numbers of which one is abov",
        ),
        (["dataset.weights=[1]"], r"weights = \[1.0\]: must have 2 numbers"),
        (["dataset.weights=[1,-1]"], r"weights.1 = -1: "),
        (
            ["dataset.weights=[1,2]", "dataset.changes=[{after_steps: 3, weights: [0, 0]}]"],
            r"changes.0.weights = \[0.0, 0.0\]: must be numbers",
        ),
        (
            [
                "dataset.sources=[digits]",
                "dataset.weights=[1]",
                "dataset.changes=[{after_steps: 3, weights: [1]}, {after_steps: 3, weights: [1]}]",
            ],
            r"after_steps are \[3, 3\]; must be in ascending order",
        ),
        (["dataset.weights=[1,2]", "dataset.train.buffer_size=4"], "buffer_size: must be null"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        mixture(folder, *overrides)
