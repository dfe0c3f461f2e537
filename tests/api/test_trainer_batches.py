"""Batches in Python are those that training sees: their order, draws and map ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pipeline import Trainer
from pipeline.config.recipe import Recipe
from pipeline.data.batch import Batch
from pipeline.training import step as stage
from tests.whole_run import run

Compose = Callable[..., Recipe]
OPS = (
    "dataset.train.ops=[{name: resize, size: [32, 32], interpolation: linear},"
    " {name: random_crop, size: [32, 32], padding: [3, 3, 3, 3]},"
    " {name: rescale, factor: 0.00392156862745098, shift: 0.0}]"
)


@pytest.mark.medium
def test_tuples_and_dicts_have_the_same_arrays(tiny: Compose) -> None:
    trainer = Trainer(tiny("model=mlp"))
    pairs = zip(trainer.tuples(epoch=1), trainer.dicts(epoch=1), strict=True)
    for (image, label), columns in pairs:
        assert list(columns) == ["image", "label"]
        np.testing.assert_array_equal(columns["image"], image)
        np.testing.assert_array_equal(columns["label"], label)
        assert (image.shape, image.dtype) == ((16, 32, 32, 1), np.float32)


def test_epoch_has_every_sample_once(tiny: Compose) -> None:
    trainer = Trainer(tiny("model=mlp"))
    for split, raw, sizes in (
        ("train", trainer.dataset.train, 6 * [16]),
        ("eval", trainer.dataset.eval, [16, 16, 8]),
    ):
        batches = list(trainer.tuples(split))  # type: ignore[arg-type]
        assert [len(label) for _, label in batches] == sizes
        labels = np.concatenate([label for _, label in batches])
        assert sorted(labels.tolist()) == sorted(raw.columns["label"].tolist())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("test", 0), "split = 'test': must be one of train, eval"), (("train", -1), "epoch = -1")],
)
def test_batches_of_an_absent_split_or_epoch_are_refused(
    arguments: tuple[Any, int], message: str, tiny: Compose
) -> None:
    with pytest.raises(ValueError, match=message):
        next(Trainer(tiny("model=mlp")).dicts(*arguments))


@pytest.mark.slow
def test_batches_equal_training_batches(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In eager mode, where the values of a step can be looked at; over two epochs."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    mapped: Any = stage.map_batch

    def note(config: Any, ops: Any, batch: Batch) -> Any:
        images, labels = mapped(config, ops, batch)
        if not isinstance(images, jax.core.Tracer):
            seen.append((np.asarray(images), np.asarray(labels)))
        return images, labels

    monkeypatch.setattr(stage, "map_batch", note)
    recipe = tiny("model=mlp", "train.steps=8", "train.mode=eager", OPS, "eval.every_epochs=null")
    run(recipe, tmp_path / "run")
    trainer = Trainer(recipe)
    expected = [*trainer.tuples(epoch=0), *trainer.tuples(epoch=1)][:8]
    assert len(seen) >= 8
    for (image, label), (own_image, own_label) in zip(seen[:8], expected, strict=True):
        np.testing.assert_allclose(own_image, image, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(own_label, label)
