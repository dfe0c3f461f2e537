"""Private runs that are killed at random moments."""

from __future__ import annotations

import json
import random
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint.checkpoint_folder import list_saved_steps
from tests import outcome
from tests.crash.killing import Crashes
from tests.crash.lives import ARGUMENTS, find_run_dir, start

SMALL = ["model=mlp", "+model.hidden=[8]", "train.batch_size=96"]
BUDGET = "noise: 1.0, delta: 1.0e-3, expected_batch_size: 24, accountant: rdp"
EVERY_STEPS = 20
STEPS = 200
SLOWEST_S = 300.0


@pytest.mark.slow
def test_killed_private_runs_equal_uninterrupted_private_runs(cache: Path, tmp_path: Path) -> None:
    """Bits of weights, the adaptive clip and the epsilon of each evaluation."""
    pytest.importorskip("dp_accounting")
    privacy = f"+privacy={{{BUDGET}, seed: 5, clip: {{quantile: 0.5}}}}"
    arguments = [*SMALL, privacy, "eval.every_steps=130", f"cache.root={cache}"]
    crashes = Crashes(tmp_path, 11, STEPS, EVERY_STEPS, arguments)
    while crashes.tally.kills < 3:
        crashes.kill_one_run(3)
    assert crashes.tally.wrong == []


@pytest.mark.slow
def test_killed_run_repeats_the_noise_of_a_step(cache: Path, tmp_path: Path) -> None:
    """With a secret, too: no step gets other noise or samples, and no step is left uncounted."""
    pytest.importorskip("dp_accounting")
    draw = random.Random(2)
    arguments = [
        *ARGUMENTS,
        *SMALL,
        f"+privacy={{{BUDGET}}}",
        f"train.steps={STEPS}",
        f"checkpoint.every_steps={EVERY_STEPS}",
        f"checkpoint.keep={STEPS}",
        f"cache.root={cache}",
        "train.resume=auto",
    ]
    losses: dict[int, float] = {}
    saved: dict[int, dict[str, np.ndarray]] = {}
    kills = 0
    while True:
        process = start(arguments, tmp_path)
        if kills < 3:
            _wait_for_checkpoint(process, tmp_path, max(saved, default=0))
            process.join(draw.uniform(0, 0.3))
            process.kill()
            kills += 1
        process.join(SLOWEST_S)
        run_dir = find_run_dir(tmp_path)
        assert run_dir is not None
        for line in (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                record = json.loads(line)
                # A step that is repeated has the loss that was already released.
                assert losses.setdefault(record["step"], record["loss"]) == record["loss"]
        for step in outcome.checkpoints(run_dir):
            arrays = outcome.arrays(run_dir, step)
            outcome.assert_equal_arrays(saved.setdefault(step, arrays), arrays)
        if process.exitcode == 0:
            break
    assert kills == 3
    assert len({arrays["features/privacy/key"].tobytes() for arrays in saved.values()}) == 1
    assert sorted(losses) == list(range(1, STEPS + 1))
    epsilons = [line["epsilon"] for line in outcome.read_lines(run_dir / "evals.jsonl")]
    assert epsilons == sorted(set(epsilons))
    assert epsilons[-1] == outcome.read_summary(run_dir)["privacy"]["epsilon"]


def _wait_for_checkpoint(process: ForkServerProcess, folder: Path, step: int) -> None:
    """Wait until there is a checkpoint after `step`, or the run has ended."""
    while process.exitcode is None:
        run_dir = find_run_dir(folder)
        if run_dir and max(list_saved_steps(run_dir / "checkpoints"), default=0) > step:
            return
        time.sleep(0.002)
