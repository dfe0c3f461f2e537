"""Runs with differential privacy: the same bits however they are trained, and what they leave."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from tests import outcome
from tests.outcome import assert_equal_arrays, assert_same_run
from tests.whole_run import run

pytest.importorskip("dp_accounting")
Compose = Callable[..., Recipe]
LAYERS = (
    "model=layers",
    "model.layers=[{name: conv, features: 3, kernel: 3, stride: 2, bias: true}, {name: group_norm,"
    " groups: 3}, relu, flatten, {name: dropout, rate: 0.2}, {name: dense, features: $classes}]",
)
SETTINGS = "noise: 1.0, delta: 1.0e-3, expected_batch_size: 24, accountant: rdp"
TESTED = f"+privacy={{{SETTINGS}, seed: 5, clip: {{quantile: 0.5, initial: 0.5}}}}"
"""With a known seed and an adaptive clip."""
PRIVATE = f"+privacy={{{SETTINGS}}}"
MLP = ("model=mlp", "model.hidden=[8]")
RUN = ("train.batch_size=96", "train.steps=20", "checkpoint.every_steps=10", "eval.every_steps=10")


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_run_does_not_depend_on_sinks_resume_and_devices(tiny: Compose, tmp_path: Path) -> None:
    data = "parallel.mode=data"
    for name, *overrides in (
        ("1", "train.sink_size=1"),
        ("7", "train.sink_size=7"),
        ("20", "train.sink_size=20"),
        ("one", data, "parallel.devices=1"),
        ("four", data, "parallel.devices=4"),
    ):
        run(tiny(*LAYERS, *RUN, TESTED, *overrides), tmp_path / name)
    assert_same_run(tmp_path / "1", tmp_path / "7")
    assert_same_run(tmp_path / "1", tmp_path / "20")
    assert_same_run(tmp_path / "one", tmp_path / "four")
    half = tmp_path / "half"
    run(tiny(*LAYERS, *RUN, TESTED, "train.end_step=10"), half)
    run(tiny(*LAYERS, *RUN, TESTED, f"train.resume={half}"))
    assert outcome.metrics(half) == outcome.metrics(tmp_path / "7")
    assert_equal_arrays(outcome.arrays(half), outcome.arrays(tmp_path / "7"))
    # The clip has moved, and more than the order of additions differs from shards.
    clips = [float(outcome.arrays(half, step)["features/privacy/clip"]) for step in (10, 20)]
    assert clips[0] != clips[1] != 0.5


@pytest.mark.medium
def test_secret_key_is_only_in_checkpoints(tiny: Compose, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    summary = run(tiny(*MLP, *RUN, PRIVATE, "monitor.tensorboard=true"), run_dir)
    secret = outcome.arrays(run_dir)["features/privacy/key"]
    assert secret.dtype == np.uint32
    assert len(set(secret.tolist())) == 4
    needles = [secret.tobytes(), *(str(word).encode() for word in secret.tolist())]
    checkpoints = run_dir / "checkpoints"
    for path in run_dir.rglob("*"):
        if checkpoints in path.parents and path.parent != checkpoints:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
        elif path.is_file():
            assert not any(needle in path.read_bytes() for needle in needles), path
    assert summary.privacy["private"] is True
    assert summary.privacy["noise"] == 1.0
    epsilons = [line["epsilon"] for line in outcome.read_lines(run_dir / "evals.jsonl")]
    assert 0 < epsilons[0] < epsilons[1] == summary.metrics["epsilon"]
    assert outcome.read_summary(run_dir)["privacy"]["epsilon"] == epsilons[1]
    events = b"".join(path.read_bytes() for path in run_dir.rglob("events*"))
    assert b"eval/epsilon" in events
    # Another run has another secret, and a resumed run has the same.
    other = tmp_path / "other"
    run(tiny(*MLP, *RUN, PRIVATE, "train.end_step=10"), other)
    before = outcome.arrays(other)["features/privacy/key"]
    assert (before != secret).any()
    run(tiny(*MLP, *RUN, PRIVATE, f"train.resume={other}"))
    after = outcome.arrays(other)["features/privacy/key"]
    np.testing.assert_array_equal(before, after)


@pytest.mark.slow
def test_noise_for_an_epsilon_depends_on_the_run_length(tiny: Compose, tmp_path: Path) -> None:
    privacy = "+privacy={epsilon: 8.0, delta: 1.0e-3, expected_batch_size: 24, accountant: rdp}"
    summary = run(tiny(*MLP, *RUN, privacy, "train.steps=10"), tmp_path)
    assert 7.9 < summary.metrics["epsilon"] <= 8.0
    with pytest.raises(RecipeError, match=r"privacy.epsilon = 8.0: needs noise .* keep its length"):
        run(tiny(*MLP, *RUN, privacy, f"train.resume={tmp_path}"))


REFUSED = {
    # Planted mistake: batch norm left in.
    "batch norm": (
        [
            "model=layers",
            "model.layers=[flatten, batch_norm, {name: dense, features: $classes}]",
        ],
        "has batch norm, which mixes the samples of a batch",
    ),
    "delta": (["privacy.delta=0.1"], "privacy.delta = 0.1: must be below 0.01, one in 96 samples"),
    "epsilon": (
        ["privacy.noise=null", "privacy.epsilon=1.0e-9", "privacy.delta=1.0e-9"],
        "privacy.epsilon = 1e-09: no noise up to 10,000 reaches it in 20 steps",
    ),
    "noise": (["privacy.noise=0.1"], "privacy.noise = 0.1: epsilon would be"),
    "batch size": (
        ["train.batch_size=32"],
        "train.batch_size = 32: must be larger for privacy.expected_batch_size = 24",
    ),
    "clip": (
        ["privacy.clip={quantile: 0.5}", "privacy.noise=3.0"],
        "privacy.noise = 3: noise = 3: must be below 2.4 with an adaptive clip",
    ),
    "canaries": (
        ["privacy.audit={canaries: 60}"],
        "privacy.audit: 60 canaries: must be at most half of 96 samples",
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", REFUSED)
def test_invalid_private_run_is_refused_before_compiling(
    tiny: Compose, tmp_path: Path, name: str
) -> None:
    overrides, problem = REFUSED[name]
    network = MLP if name != "batch norm" else ()
    with pytest.raises(RecipeError) as error:
        run(tiny(*network, *RUN, PRIVATE, *overrides), tmp_path / "run")
    assert problem in str(error.value)
    assert not os.path.exists(tmp_path / "run" / "metrics.jsonl")
