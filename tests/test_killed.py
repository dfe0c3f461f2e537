"""A run that is killed loses nothing that it had saved."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.config.recipe import Recipe
from pipeline.job import run
from tests import outcome
from tests.conftest import TINY

LENGTH = ["train.steps=400", "train.sink_size=70", "checkpoint.every_steps=40"]


def test_a_killed_run_is_finished_by_the_same_command(
    tiny: Callable[..., Recipe], cache: Path, tmp_path: Path
) -> None:
    """kill -9 behind the first checkpoint; K-05."""
    run(tiny(*LENGTH), tmp_path / "unbroken")
    arguments = [*TINY, *LENGTH, "train.resume=auto"]
    command = [sys.executable, "-m", "pipeline", *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent)}

    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        wait_for_a_checkpoint(tmp_path, process)
        process.kill()
    (killed,) = tmp_path.glob("outputs/*/*")
    assert process.returncode == -9
    assert not (killed / "summary.json").exists()
    assert len(outcome.metrics(killed)) < 400

    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "")
    assert list(tmp_path.glob("outputs/*/*")) == [killed]
    summary = outcome.read_summary(killed)
    assert summary["resumed_from"]["step"] in range(40, 400, 40)
    assert (summary["status"], summary["steps"]) == ("done", 400)
    unbroken = tmp_path / "unbroken" / "metrics.jsonl"
    assert (killed / "metrics.jsonl").read_bytes() == unbroken.read_bytes()
    outcome.assert_equal_arrays(outcome.arrays(killed), outcome.arrays(tmp_path / "unbroken"))


def wait_for_a_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not list(folder.glob("outputs/*/*/checkpoints/*0/state")):
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
