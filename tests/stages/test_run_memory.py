"""Jobs of a sweep in one process: the data of a run that is over takes no memory."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.data.columns import RawData
from pipeline.data.sources import npz
from tests.whole_run import run


@pytest.mark.slow
def test_finished_run_releases_its_data(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = np.zeros((64, 28, 28, 1), np.uint8)
    labels = np.arange(64) % 10
    arrays = {"x_train": images, "y_train": labels, "x_test": images[:20], "y_test": labels[:20]}
    np.savez(tmp_path / "data.npz", **arrays)
    kept: list[weakref.ref[np.ndarray]] = []
    make_class_data = npz.make_class_data

    def watched(*args: object) -> RawData:
        raw = make_class_data(*args)  # type: ignore[arg-type]
        kept.extend(weakref.ref(split.columns["image"]) for split in (raw.train, raw.eval))  # type: ignore[type-var]
        return raw

    monkeypatch.setattr(npz, "make_class_data", watched)
    recipe = [
        "dataset=numpy",
        f"dataset.root={tmp_path / 'data.npz'}",
        "model=lenet5",
        "dataset.train.ops=[{name:resize,size:[32,32]},{name:rescale,factor:0.0039,shift:0.0}]",
        "dataset.eval.ops=[{name:resize,size:[32,32]},{name:rescale,factor:0.0039,shift:0.0}]",
        "monitor.tensorboard=false",
        "monitor.sample_images=0",
        "train.batch_size=16",
        "train.steps=6",
        f"cache.root={cache}",
    ]
    for job in range(2):
        run(load_recipe(overrides=[*recipe, f"seed={job}"]), tmp_path / str(job))
    gc.collect()
    assert len(kept) == 4
    assert [ref() is None for ref in kept] == 4 * [True]
