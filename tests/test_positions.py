"""Networks with a label at every position, from the recipe to the summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe, run
from pipeline.stages.record.summary import Summary

QUIET = ["monitor.tensorboard=false", "monitor.sample_images=0", "schedule=constant"]


def trained(
    folder: Path, cache: Path, x: np.ndarray, y: np.ndarray, overrides: Sequence[str]
) -> Summary:
    """A run on these samples, of which the last 20 are evaluated."""
    file = folder / "samples.npz"
    np.savez(file, x_train=x[:-20], y_train=y[:-20], x_test=x[-20:], y_test=y[-20:])
    data = [
        "dataset=numpy",
        f"dataset.root={file}",
        "dataset.train.ops=[]",
        "dataset.eval.ops=[]",
    ]
    recipe = load_recipe(overrides=[*data, *QUIET, f"cache.root={cache}", *overrides])
    return run(recipe, folder / "run")


@pytest.mark.slow
def test_gpt_learns_to_count(tmp_path: Path, cache: Path) -> None:
    generator = np.random.default_rng(0)
    first, step = generator.integers(0, 11, (2, 340, 1))
    numbers = (first + (1 + step % 3) * np.arange(9)) % 11
    summary = trained(
        tmp_path,
        cache,
        numbers[:, :-1, None].astype(np.float32),
        numbers[:, 1:],
        [
            "model=gpt2",
            "model.features=32",
            "model.hidden=64",
            "model.heads=2",
            "model.blocks=2",
            "model.dropout=0.0",
            "optimizer=adam",
            "train.optimizer.lr=0.01",
            "train.batch_size=16",
            "train.steps=200",
        ],
    )
    assert (summary.status, summary.metrics["count"]) == ("done", 20 * 8)
    # A token alone tells its successor in a third of the cases, those before it tell it in all. The
    # first has none before it, so who guesses all must have seen what comes.
    assert 0.75 < summary.metrics["accuracy"] < 0.97
    assert summary.metrics["accuracy"] == summary.metrics["recall"]["micro"]


@pytest.mark.slow
def test_unet_learns_bright_pixels(tmp_path: Path, cache: Path) -> None:
    images = np.random.default_rng(0).random((84, 8, 12, 1), np.float32)
    summary = trained(
        tmp_path,
        cache,
        images,
        (images[..., 0] > 0.5).astype(np.int64),
        [
            "model=unet",
            "model.widths=[4,8]",
            "optimizer=adam",
            "train.optimizer.lr=0.01",
            "train.batch_size=16",
            "train.steps=120",
        ],
    )
    assert (summary.status, summary.metrics["count"]) == ("done", 20 * 8 * 12)
    assert summary.metrics["accuracy"] > 0.95
