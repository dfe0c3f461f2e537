"""A network that learns from tables: its prior, and its network after a few steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipeline
from pipeline.core import registry

FOLDER = Path(__file__).parents[1] / "examples" / "prior_fitted"


@pytest.fixture(scope="module")
def components() -> ModuleType:
    """The module, whose components are registered."""
    spec = importlib.util.spec_from_file_location("prior_components", FOLDER / "components.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    # The module stays: its classes do, and the schema of recipes reads their text.
    return module


def draw(components: ModuleType, count: int, xp: Any = np) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(1).random((count, sum(components.DRAWS.values())))
    cells, labels = components.draw_tables(xp, xp.asarray(numbers.astype(np.float32)))
    return np.asarray(cells), np.asarray(labels)


@pytest.mark.medium
def test_tables_are_the_same_on_the_host_and_in_the_step(components: ModuleType) -> None:
    host, device = draw(components, 64), draw(components, 64, jnp)
    assert [array.dtype for array in host] == [array.dtype for array in device]
    equal = [np.allclose(*pair, atol=1e-3) for pair in zip(host[0], device[0], strict=True)]
    # A step, or a tie at a border, may fall otherwise by a last bit.
    assert np.mean(equal) > 0.9


@pytest.mark.medium
def test_shown_rows_come_first_and_the_others_have_labels(components: ModuleType) -> None:
    cells, labels = draw(components, 256)
    shown = cells[:, :, 0, -1]
    is_known = shown >= 0
    assert np.array_equal(is_known, labels[:, :, 0] == components.QUERY)
    assert (np.diff(is_known.astype(int), axis=1) <= 0).all()
    assert set(np.unique(labels)) == {0, 1, components.QUERY}
    share = is_known.mean(axis=1)
    assert share.min() > 0.2
    assert share.max() < 0.8
    classes = np.where(is_known, shown, labels[:, :, 0])
    ones = classes.mean(axis=1)
    assert np.median(ones) == pytest.approx(0.5, abs=0.1)
    # The class is no feature, or every table would be a single comparison.
    features = cells[:, :, 0, :-1]
    assert np.isfinite(features).all()
    split = [
        any(_separates(table[:, column], row) for column in range(table.shape[1]))
        for table, row in zip(features, classes, strict=True)
    ]
    assert np.mean(split) < 0.3


def _separates(feature: np.ndarray, classes: np.ndarray) -> bool:
    ones, zeros = feature[classes == 1], feature[classes == 0]
    return bool(len(ones) and len(zeros) and (ones.min() > zeros.max() or ones.max() < zeros.min()))


@pytest.mark.medium
def test_neither_order_matters_and_rows_to_predict_are_independent(components: ModuleType) -> None:
    cells, labels = draw(components, 3)
    network = components.make_network(16, 2, 2, 2)
    weights = network.init(jax.random.key(0), cells, train=False)
    apply = jax.jit(lambda cells: network.apply(weights, cells, train=False))
    logits = np.asarray(apply(cells))
    random = np.random.default_rng(2)
    rows = random.permutation(cells.shape[1])
    np.testing.assert_allclose(apply(cells[:, rows]), logits[:, rows], atol=2e-4)
    columns = np.append(random.permutation(cells.shape[3] - 1), cells.shape[3] - 1)
    np.testing.assert_allclose(apply(cells[..., columns]), logits, atol=2e-4)
    first, count = int((labels[0, :, 0] == components.QUERY).sum()), cells.shape[1]
    changed = cells.copy()
    changed[0, first + 1 :, :, :-1] += 5
    np.testing.assert_allclose(apply(changed)[0, : first + 1], logits[0, : first + 1], atol=2e-4)
    assert not np.allclose(apply(changed)[0, first + 1 : count], logits[0, first + 1 :], atol=1e-3)


@pytest.mark.slow
def test_recipe_trains_on_new_tables_in_every_step(components: ModuleType, tmp_path: Path) -> None:
    """With two steps of one seed the losses differ, and the weights that `evaluate.py` applies are
    those that a run predicts with."""
    assert registry.list_components("dataset")["prior_tables"] is not None
    keys = ["train.steps=24", "train.sink_size=12", "train.batch_size=8", "dataset.train_size=8"]
    keys += ["model.size=16", "model.blocks=1", "dataset.eval_size=16", "autotune=off"]
    recipe = pipeline.load_recipe(str(FOLDER / "prior_fitted.yaml"), keys)
    summary = pipeline.run(recipe, tmp_path / "run")
    run = pipeline.load_run(tmp_path / "run")
    # One batch is an epoch, so without new tables the same eight would be read again and again.
    losses = run.history.steps["loss"]
    assert len(set(losses.tolist())) == 24
    assert np.abs(np.diff(losses)).max() > 0.01
    cells, _ = draw(components, 4)
    network = components.make_network(16, 4, 1, 2)
    from flax import traverse_util

    weights = traverse_util.unflatten_dict(dict(run.parameters), sep="/")
    expected = network.apply({"params": weights}, cells, train=False)
    np.testing.assert_allclose(run.predict(cells), expected, atol=1e-4)
    assert 0 < summary.metrics["pixel_accuracy"] < 1
