"""Trial runs: they are stopped early, leave nothing, and fail as a run does."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.errors import RunError
from pipeline.stages.launch.job_file import run_trial
from tests.conftest import MLP, TINY

MIB = 1 << 20


@pytest.mark.slow
def test_trial_run_stops_after_its_first_steps(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    local = ["launch=local", "launch.processes=2", "parallel.mode=data"]
    names = ["checkpoint.prefix=copies", "checkpoint.directory=copies", "hydra.run.dir=mine"]
    length = ["train.steps=1000000", f"cache.root={cache}"]
    trial = run_trial([*TINY, *MLP, *length, *local, *names])
    assert trial.stop_s is not None
    assert 0 < trial.stop_s < 60
    assert trial.start_s > 0
    assert 100 * MIB < trial.memory_bytes < 8192 * MIB
    assert list(tmp_path.iterdir()) == []


def test_memory_is_of_the_trial_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # A new process begins with the peak of the process that starts it.
    larger = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + 256 * MIB
    subprocess.run([sys.executable, "-c", f"b'x' * {larger}"], check=True)
    monkeypatch.setattr(sys, "executable", "true")
    assert 0 < run_trial([]).memory_bytes < larger


@pytest.mark.slow
def test_failing_trial_run_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="a run of this recipe ends here with exit status 2"):
        run_trial([*TINY, "train.steps=9", "dataset.train_size=1"])
    assert "error: " in capfd.readouterr().err
