"""Frozen weights, rates by pattern, averages and microbatches in whole runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from tests import outcome
from tests.conftest import compose_tiny
from tests.whole_run import run

Compose = Callable[..., Recipe]

INIT = "model.init={rules: [{pattern: dense_2/bias, init: zeros}]}"
ALL = [
    "model=layers",
    "model.layers=[{name: conv, features: 3, kernel: 3, stride: 2}, relu,"
    "{name: conv, features: 3, kernel: 3}, relu, flatten, {name: dense, features: 8}, relu,"
    "{name: dense, features: 8}, relu, {name: dense, features: $classes}]",
    "train.freeze=[conv_*]",
    "train.lr_rules=[{pattern: 'dense_2', factor: 2.0}]",
    "train.ema={decay: 0.9, warmup: true}",
    "train.accumulate_steps=2",
    INIT,
    "train.steps=30",
    "train.optimizer.lr=0.2",
    "train.sink_size=7",
    "eval.every_steps=10",
    "checkpoint.every_steps=5",
    "checkpoint.keep=99",
]


@pytest.fixture(scope="module")
def whole(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 steps with everything on."""
    run_dir = tmp_path_factory.mktemp("whole")
    run(compose_tiny(cache, *ALL), run_dir)
    return run_dir


@pytest.mark.slow
def test_frozen_weights_are_unchanged_and_the_average_is_saved(whole: Path) -> None:
    first, last = outcome.arrays(whole, 5), outcome.arrays(whole, 30)
    still = [path for path in first if path.startswith("params/conv_")]
    assert len(still) == 2
    assert all(np.array_equal(first[path], last[path]) for path in still)
    averages = sorted(path for path in last if path.startswith("features/average/"))
    assert len(averages) == 6
    assert not any("conv_" in path for path in averages)
    for path in averages:
        weights = path.replace("features/average", "params", 1)
        assert not np.array_equal(last[path], last[weights])
    assert not any("conv_" in path for path in last if path.startswith("opt_state"))


@pytest.mark.slow
def test_compared_run_learns(whole: Path) -> None:
    """Equal bits mean little if weights hardly change."""
    first, *_, last = [line["loss"] for line in outcome.read_lines(whole / "evals.jsonl")]
    assert last < first - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["train.sink=false", "train.sink_size=1000", "train.mechanism=soft", "train.feed=stream"]
)
def test_run_does_not_depend_on_the_sinks(
    how: str, whole: Path, tiny: Compose, tmp_path: Path
) -> None:
    run(tiny(*ALL, how), tmp_path)
    outcome.assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_resumed_run_continues_with_the_average(whole: Path, tiny: Compose, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    (run_dir / "summary.json").unlink()
    for step in outcome.checkpoints(run_dir):
        if step > 10:
            shutil.rmtree(make_checkpoint_path(run_dir / "checkpoints", step))
    run(tiny(*ALL, f"train.resume={run_dir}"))
    outcome.assert_same_run(run_dir, whole)


@pytest.mark.slow
@pytest.mark.parametrize("on", [True, False])
def test_checkpoint_evaluation_uses_its_average(
    on: bool, whole: Path, tiny: Compose, tmp_path: Path
) -> None:
    """With or without an average of its own, a restored network is the one that was measured."""
    options = ALL if on else [*ALL[:2], INIT]
    stages = "stages=[data,build,compile,eval]"
    summary = run(tiny(*options, stages, f"checkpoint.restore={whole}"), tmp_path)
    (own,) = [e for e in outcome.read_lines(whole / "evals.jsonl") if e["step"] == 20]
    final = outcome.read_summary(whole)["metrics"]
    assert summary.metrics == {name: final[name] for name in summary.metrics}
    assert own["loss"] != final["loss"]
