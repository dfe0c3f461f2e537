"""Several processes on this machine: the bits of one, and an end for all where one ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess as Process
from pathlib import Path

import pytest

from pipeline import load_recipe
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.checkpoint.restore import read_saved
from pipeline.core.host.launchers import RankPlace, find_place
from pipeline.core.host.signals import Interrupted, Signals
from pipeline.stages.launch import local
from tests import outcome
from tests.forked import start_forked
from tests.stages.launch.engines import ENGINES
from tests.whole_run import run

pytestmark = pytest.mark.slow

TINY = (
    "+recipe=lenet5_digits",
    "model=mlp",
    "model.hidden=[12]",
    "train.optimizer.lr=0.001",
    "monitor.tensorboard=false",
    "eval.every_epochs=null",
    "checkpoint.every_steps=200",
    "train.sink_size=50",
    "parallel.mode=data",
)
TWO = ("launch=local", "launch.processes=2", "launch.heartbeat_seconds=10")
LONG = "train.steps=20000"
END_S = 5.0
"""Time within which all processes have ended once one was killed."""


@pytest.fixture
def start(cache: Path, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start the command in the test's folder; it is killed when the test ends."""
    started = []

    def go(*arguments: str, run_dir: str = "run") -> Process:
        process = start_forked(
            [*TINY, *arguments, f"hydra.run.dir={run_dir}"],
            tmp_path,
            {**os.environ, "XDG_CACHE_HOME": str(cache.parent)},
            [tmp_path / "said"] * 2,
        )
        started.append(process)
        return process

    yield go
    for process in started:
        process.kill()
        process.join()


def wait(process: Process, seconds: float) -> int:
    """Return the exit status of a command, which must have ended within so many seconds."""
    process.join(seconds)
    assert process.exitcode is not None, f"no end within {seconds:g} s"
    return process.exitcode


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


def workers_of(process: Process) -> list[int]:
    """The process IDs of a run's processes, the first one's first."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(map(int, children))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet reaped doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def has_trained(folder: Path) -> bool:
    """Whether a checkpoint has been written."""
    return (make_checkpoint_path(folder / "run/checkpoints", 200) / "manifest.json").exists()


def normal(folder: Path) -> list[object]:
    return [outcome.metrics(folder), outcome.read_lines(folder / "evals.jsonl")]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_processes_ignore_the_rank_of_another_launcher(engine: str, size: int) -> None:
    """The command may be a process of a launcher itself."""
    outer = {**ENGINES[engine](3, 8, 7), **ENGINES["slurm"](3, 8, 7), "HOME": "/home/me"}
    inner = local.make_environment(outer, 0, size, 29_501)
    place = find_place("env", inner)
    assert place == (None if size == 1 else RankPlace(0, 2, "127.0.0.1:29501", "torchrun"))
    assert inner["HOME"] == "/home/me"


@pytest.mark.usefixtures("optimized_programs")
def test_two_processes_and_one_have_the_same_bits(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From Python; tests/core/plugins/test_runs.py does it by the command."""
    own = [*TINY[1:], "train.steps=60", f"cache.root={cache}"]
    summary = run(load_recipe("lenet5_digits", [*own, *TWO]), tmp_path / "run")
    assert (summary.status, summary.steps) == ("done", 60)
    run(load_recipe("lenet5_digits", [*own, "parallel.devices=1"]), tmp_path / "one")
    assert normal(tmp_path / "run") == normal(tmp_path / "one")
    assert "Gloo" not in "".join(capfd.readouterr())
    assert "Rank 1 is connected" in (tmp_path / "run/ranks/1.log").read_text()
    assert outcome.read_summary(tmp_path / "run")["status"] == "done"


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_fsdp_processes_save_the_state_of_one_device(cache: Path, tmp_path: Path) -> None:
    """Two processes of four devices; each has a part, and the first writes the whole arrays."""
    own = [*TINY[1:], "optimizer=adam", "train.steps=60", f"cache.root={cache}"]
    shared = ["parallel.mode=fsdp", "parallel.devices=8", "checkpoint.every_steps=20"]
    run(load_recipe("lenet5_digits", [*own, *TWO, *shared]), tmp_path / "run")
    run(load_recipe("lenet5_digits", [*own, "parallel.mode=data"]), tmp_path / "one")
    assert normal(tmp_path / "run") == normal(tmp_path / "one")
    parts, whole = (read_saved(tmp_path / name).arrays for name in ("run", "one"))
    assert {path: array.tobytes() for path, array in parts.items()} == {
        path: array.tobytes() for path, array in whole.items()
    }


@contextmanager
def training(
    start: Callable[..., Process], folder: Path, *more: str
) -> Iterator[tuple[Process, list[int]]]:
    """A run of two processes that has saved; afterwards none of them is left."""
    process = start(LONG, *TWO, *more)
    wait_for(lambda: has_trained(folder))
    workers = workers_of(process)
    assert len(workers) == 2
    yield process, workers
    wait_for(lambda: not any(map(is_alive, workers)), END_S)


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_process_ends_all(start: Callable[..., Process], tmp_path: Path, rank: int) -> None:
    with training(start, tmp_path) as (process, workers):
        os.kill(workers[rank], signal.SIGKILL)
        assert wait(process, END_S) == 1
    said = (tmp_path / "said").read_text()
    assert f"error: process {rank} of 2 was ended by SIGKILL; log: run/ranks/{rank}.log" in said
    assert said.count("error:") == 1
    assert re.search(r"^resume .*launch.processes=2.* train.resume=./run$", said, re.MULTILINE)


@pytest.mark.usefixtures("optimized_programs")
def test_run_continues_with_the_remaining_processes(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    """Four, then two, then one; the losses are those of a run without a death."""
    length = ("train.steps=3000", "train.dispatch_seconds=0.2")
    four = ("launch=local", "launch.processes=4", "launch.restarts=3", "launch.min_processes=1")
    process = start(*length, *four)
    wait_for(lambda: has_trained(tmp_path))
    os.kill(workers_of(process)[2], signal.SIGKILL)
    wait_for(lambda: "restart 1 of 3 in 2 of the processes" in (tmp_path / "said").read_text())
    wait_for(lambda: len(workers_of(process)) == 2)
    wait_for(lambda: (tmp_path / "run/ranks/1.log").read_text().count("from step") == 1)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    assert wait(process, 120) == 0
    said = (tmp_path / "said").read_text()
    assert "restart 2 of 3 in 1 of the processes: process 0 of 2 was ended by SIGKILL" in said
    assert wait(start(*length, run_dir="whole"), 120) == 0
    assert normal(tmp_path / "run") == normal(tmp_path / "whole")


def test_unresponsive_process_ends_all(start: Callable[..., Process], tmp_path: Path) -> None:
    """Within the time without a heartbeat, 6 s here, and that of an end."""
    with training(start, tmp_path, "launch.heartbeat_seconds=6") as (process, workers):
        os.kill(workers[1], signal.SIGSTOP)
        assert wait(process, 6 + 2 * END_S) == 1
    assert (
        "error: process 1 of 2 did not answer; log: run/ranks/1.log"
        in (tmp_path / "said").read_text()
    )


def test_workers_end_if_the_command_is_killed(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    with training(start, tmp_path) as (process, _):
        process.kill()
        assert wait(process, END_S) == -signal.SIGKILL
    assert "error:" not in (tmp_path / "said").read_text()


@pytest.mark.usefixtures("optimized_programs")
def test_stopped_run_continues_in_one_process(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    """Stopped in order by a signal, resumed alone: equal to a run that was not stopped."""
    length = ("train.steps=1000", "train.dispatch_seconds=0.2")
    process = start(*length, *TWO)
    wait_for(lambda: has_trained(tmp_path))
    process.terminate()
    assert wait(process, 60) == 75
    summary = outcome.read_summary(tmp_path / "run")
    assert (summary["status"], summary["reason"]) == ("stopped", "SIGTERM received")
    assert summary["steps"] < 1000
    assert wait(start(*length, "train.resume=run"), 120) == 0
    assert wait(start(*length, run_dir="whole"), 120) == 0
    assert normal(tmp_path / "run") == normal(tmp_path / "whole")


def test_run_stopped_before_training_is_interrupted(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    """The first process imports modules, or waits for the second one."""
    for number, seconds in enumerate((0.0, 1.0)):
        process = start(*TWO, LONG, run_dir=f"run_{number}")
        wait_for(lambda process=process: len(workers_of(process)) == 2)
        time.sleep(seconds)
        process.terminate()
        assert wait(process, 60) == 75
    said = (tmp_path / "said").read_text()
    assert said.startswith("interrupted\n")
    assert "error:" not in said


@pytest.mark.parametrize(
    "ends",
    [
        ("kill -INT $$", "exit 0"),
        ("exit 75", "sleep 60"),
        ("kill -ABRT $$", "exit 75"),
        ("kill -ABRT $$", "kill -ABRT $$"),
    ],
)
def test_stop_of_all_processes_is_not_a_failure(
    ends: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler may signal all of them; JAX then aborts those that miss others."""

    @contextmanager
    def start_shells(*_: object) -> Iterator[list[subprocess.Popen[bytes]]]:
        shells = [subprocess.Popen(["sh", "-c", end]) for end in ends]
        yield shells
        for shell in shells:
            shell.kill()
            shell.wait()

    monkeypatch.setattr(local, "_start_workers", start_shells)
    monkeypatch.setattr(local, "GRACE_S", 0.1)
    signals = Signals()
    signals.stop = "SIGTERM received"
    launch = load_recipe("lenet5_digits", ["parallel.mode=data", "launch=local"]).launch
    with pytest.raises(Interrupted, match="SIGTERM received"):
        local.run_locally({}, tmp_path, signals, launch)


def test_fine_tuned_run_restarts_from_its_checkpoint(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    """An earlier request to save isn't passed on: it would end a process that starts."""
    assert wait(start("train.steps=50", run_dir="before"), 120) == 0
    more = ("launch.restarts=1", "checkpoint.restore=before")
    with training(start, tmp_path, *more) as (process, workers):
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        os.kill(workers[1], signal.SIGKILL)
        wait_for(lambda: (tmp_path / "run/ranks/1.log").read_text().count("from step") == 1)
        process.terminate()
        assert wait(process, 60) == 75
    assert "error:" not in (tmp_path / "said").read_text()


def test_error_of_all_processes_is_reported_once(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    process = start(*TWO, "dataset=mnist", "dataset.root=/nowhere", "train.steps=10")
    assert wait(process, 120) == 2
    said = (tmp_path / "said").read_text()
    assert said.count("error:") == 1
    assert "/nowhere lacks train-images-idx3-ubyte.gz" in said


def test_error_of_another_process_is_reported_with_its_log(
    start: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that finds another data set than the first one."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import pipeline.stages.build as build\n"
        "    from pipeline.core.errors import RunError\n"
        "    def fail(*_): raise RunError('the disk of this node is full')\n"
        "    build.make_step_config = fail\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started_at = time.monotonic()
    process = start(*TWO, LONG)
    assert wait(process, 120) == 1
    assert time.monotonic() - started_at < 60
    said = (tmp_path / "said").read_text()
    assert (
        "error: process 1 of 2 has failed: the disk of this node is full; log: run/ranks/1.log"
        in said
    )
