"""Runs with THOR that must have the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]
SHORT = (
    "optimizer=thor",
    "train.optimizer.frequency=4",
    "train.optimizer.damping={initial: 0.1, decay_rate: 0.5, decay_steps: 20}",
    "train.steps=10",
    "checkpoint={every_steps: 5, keep: 9}",
)
"""Ten steps, with curvature at steps 1, 5 and 9."""


def require_same_bits(
    tiny: Compose, folder: Path, keys: Sequence[str], variants: Sequence[Sequence[str]]
) -> Path:
    """Losses, weights and inverses of all steps are the same with other keys, and after a resume.

    Returns the directory of the first run.
    """
    first = folder / "first"
    assert run(tiny(*SHORT, *keys, "train.sink_size=1"), first).status == "done"
    inverses = [array for path, array in outcome.arrays(first).items() if "inverses" in path]
    assert any(np.any(array) for array in inverses)
    for number, variant in enumerate(variants):
        run_dir = folder / str(number)
        assert run(tiny(*SHORT, *keys, *variant), run_dir).status == "done"
        _require_equal(run_dir, first)
    resumed = shutil.copytree(first, folder / "resumed")
    (resumed / "summary.json").unlink()
    shutil.rmtree(make_checkpoint_path(resumed / "checkpoints", 10))
    run(tiny(*SHORT, *keys, "train.sink_size=7", f"train.resume={resumed}"))
    _require_equal(resumed, first)
    return first


def _require_equal(run_dir: Path, first: Path) -> None:
    assert outcome.metrics(run_dir) == outcome.metrics(first)
    for step in outcome.checkpoints(first):
        outcome.assert_equal_arrays(outcome.arrays(run_dir, step), outcome.arrays(first, step))
