from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.backends.xla import XlaExecutable
from pipeline.checkpoint import checkpointer
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.checkpoint.manifest import verify_files
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.host.signals import (
    Interrupted,
    Signals,
    handle_signals,
    replace_interrupt_traceback,
)
from pipeline.stages import run as run_module
from pipeline.stages.runner import programs
from tests import outcome
from tests.conftest import TINY
from tests.whole_run import run

Compose = Callable[..., Recipe]
STOP = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def signals() -> Iterator[Signals]:
    made = Signals()
    with handle_signals(made):
        yield made


@pytest.mark.parametrize("number", STOP, ids=lambda number: number.name)
def test_signal_to_stop_interrupts(number: signal.Signals, signals: Signals) -> None:
    with pytest.raises(Interrupted) as caught:
        signal.raise_signal(number)
    assert str(caught.value) == signals.stop == f"{number.name} received"


@pytest.mark.parametrize("number", STOP, ids=lambda number: number.name)
def test_held_signal_is_noted_and_a_second_interrupts(
    number: signal.Signals, signals: Signals
) -> None:
    with signals.hold_stops():
        signal.raise_signal(number)
        assert signals.stop == f"{number.name} received"
        with pytest.raises(Interrupted) as caught:
            signal.raise_signal(signal.SIGINT)
        assert str(caught.value) == f"{number.name} received, then SIGINT received"
        signal.raise_signal(number)


@pytest.mark.parametrize("first", STOP, ids=lambda number: number.name)
def test_hangup_is_not_a_second_signal(first: signal.Signals, signals: Signals) -> None:
    """Shell and system send a SIGHUP each, systemd one after its SIGTERM; all is to be saved."""
    with signals.hold_stops():
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert signals.stop == f"{first.name} received"
        with pytest.raises(Interrupted, match=f"^{first.name} received, then SIGTERM received$"):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)


@pytest.mark.parametrize("number", STOP, ids=lambda number: number.name)
def test_signal_after_the_end_of_a_command_leaves_its_status(number: signal.Signals) -> None:
    script = (
        "import signal; from pipeline.core.host.signals import end_on_signal, interrupt_command;"
        f"interrupt_command(); end_on_signal(7); signal.raise_signal({int(number)}); print('on')"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "", "")


def test_signal_while_importing_ends_with_the_output(tmp_path: Path) -> None:
    (tmp_path / "imported.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    script = (
        "import sys; from pipeline.core.host.signals import interrupt_command;"
        f"interrupt_command('stopped\\n'); sys.path.append({str(tmp_path)!r}); import imported"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (75, "stopped\n", "interrupted\n")


@pytest.mark.parametrize("listens", ["a run", "a command"])
def test_signal_ignored_by_nohup_remains_ignored(listens: str) -> None:
    calls = {"a run": "handle_signals(Signals()).__enter__()", "a command": "interrupt_command()"}
    script = (
        "import signal; from pipeline.core.host.signals import *; "
        f"{calls[listens]}; signal.raise_signal(signal.SIGHUP); print('alive');"
        "signal.raise_signal(signal.SIGTERM)"
    )
    said = subprocess.run(
        ["nohup", sys.executable, "-c", script], stdin=subprocess.DEVNULL, capture_output=True
    )
    assert said.stdout == b"alive\n"
    assert said.returncode != 0


def test_signals_after_the_first_are_ignored(signals: Signals) -> None:
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert signals.stop == "SIGTERM received"


def test_check_raises_for_a_noted_signal(signals: Signals) -> None:
    signals.check()
    with signals.hold_stops():
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"^SIGTERM received$"):
        signals.check()
    signal.raise_signal(signal.SIGTERM)


def test_check_raises_for_a_swallowed_signal(signals: Signals) -> None:
    """Python drops what is raised in a finalizer."""
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Interrupted):
        signals.check()


IMPORTED = "import signal; signal.raise_signal(signal.SIGTERM)"


def test_signal_during_import_is_noted(
    signals: Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_here.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("imported_here")
    assert signals.stop == "SIGTERM received"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("where", ["in an import", "outside"])
def test_signal_before_a_run_ends_the_command(name: str, where: str, tmp_path: Path) -> None:
    sending = IMPORTED.replace("SIGTERM", name)
    (tmp_path / "imported_here.py").write_text(sending)
    call = "import imported_here" if where == "in an import" else sending
    script = (
        "from pipeline.core.report_errors import report_errors;"
        "from pipeline.core.host.signals import interrupt_command;"
        f"interrupt_command(); exit(report_errors(lambda: exec('{call}'), debug=False))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (75, "", "interrupted\n")


WATCHED = """
import ctypes, os, signal, sys, threading, time
from pipeline.core.host import signals as module
from pipeline.core.host.signals import *
signals = Signals()
interrupt_command()
def send(*numbers):
    for number in numbers:
        signal.raise_signal(number)
        time.sleep(0.3)
with watch_signals(), handle_signals(signals), end_with(lambda: print(signals.reason)):
    {body}
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("body", "status", "printed"),
    [
        ("send(15); time.sleep(20)", 75, "SIGTERM received"),
        ("send(15); signals.check()", 1, ""),
        ("signals.is_held = True; send(15); time.sleep(1.5); sys.exit(7)", 7, ""),
        ("signals.is_held = True; send(15, 1); time.sleep(1.5); sys.exit(7)", 7, ""),
        ("signals.is_held = True; send(1, 2)", 75, "SIGHUP received, then SIGINT received"),
        ("signals.is_held = True; send(15, 15, 2)", 75, "SIGTERM received, then SIGTERM received"),
        (
            "threading.Timer(0.3, os.kill, (os.getpid(), 15)).start(); "
            "[ctypes.CDLL(None).sleep(9) for _ in (1, 2)]",
            75,
            "SIGTERM received",
        ),
    ],
    ids=["unnoticed", "noticed", "held", "hung up", "two", "three", "in C code"],
)
def test_watched_signal_ends_the_process_after_its_endings(
    body: str, status: int, printed: str
) -> None:
    """Nothing is raised where the main thread is."""
    script = WATCHED.format(body=body)
    start_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (status, printed), ended.stderr
    assert time.monotonic() - start_s < 18
    assert ("Interrupted: SIGTERM received" in ended.stderr) == (status == 1)


@pytest.mark.medium
def test_signal_raises_nothing_in_c_code_of_a_watched_run() -> None:
    """A sort calls Python from C code; an exception of a handler would leave it."""
    body = (
        "signals.is_held = True\n"
        "    class Key(int):\n"
        "        sent = []\n"
        "        def __lt__(self, other):\n"
        "            if not Key.sent:\n"
        "                Key.sent.append(os.kill(os.getpid(), 15))\n"
        "            return int(self) < int(other)\n"
        "    print(sorted(map(Key, range(1000, 0, -1))) == list(range(1, 1001)), flush=True)\n"
        "    os._exit(3)"
    )
    script = WATCHED.format(body=body)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("True\n", 3), ended.stderr


def test_ending_waits_while_the_main_thread_concludes() -> None:
    body = "send(15)\n    with conclude():\n        time.sleep(2); print('whole', flush=True)"
    script = WATCHED.format(body=f"{body}\n    time.sleep(20)")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (75, "whole\nSIGTERM received\n"), ended.stderr


def test_error_that_c_code_made_of_an_interrupt_is_recognised(signals: Signals) -> None:
    """As `SystemError: _ScalarMeta.__numpy_dtype__ returned a result with an exception set`."""
    error = SystemError("returned a result with an exception set")
    assert signals.recognise(error) is error
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    recognised = signals.recognise(error)
    assert isinstance(recognised, Interrupted)
    assert str(recognised) == "SIGTERM received"
    refusal = RunError("a full disk")
    assert signals.recognise(refusal) is refusal


def test_error_that_c_code_made_of_an_interrupt_of_a_command_is_replaced() -> None:
    script = (
        "import signal; from contextlib import suppress;"
        "from pipeline.core.report_errors import report_errors;"
        "from pipeline.core.host.signals import interrupt_command, raise_interrupts\n"
        "def act():\n"
        "    with raise_interrupts():\n"
        "        with suppress(KeyboardInterrupt): signal.raise_signal(15)\n"
        "        raise SystemError('returned a result with an exception set')\n"
        "interrupt_command(); exit(report_errors(act, debug=False))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (75, "interrupted\n")


@pytest.mark.slow
@pytest.mark.mlp
def test_error_after_a_signal_ends_the_run_as_stopped(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        raise SystemError("_ScalarMeta.__numpy_dtype__ returned a result with an exception set")

    monkeypatch.setattr(run_module, "build", build)
    summary = run(tiny(), tmp_path / "run")
    assert (summary.status, summary.reason) == ("stopped", "SIGTERM received")
    assert outcome.read_summary(tmp_path / "run")["exit_status"] == 75


def test_save_signals_are_counted(signals: Signals) -> None:
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert (signals.saves, signals.stop) == (2, None)


def test_signal_handlers_are_restored() -> None:
    numbers = [*STOP, signal.SIGUSR1]
    before = [signal.getsignal(number) for number in numbers]
    with handle_signals(Signals()):
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.slow
@pytest.mark.mlp
def test_run_in_another_thread_works_without_signals(tiny: Compose, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        summary = pool.submit(run, tiny("train.steps=7"), tmp_path / "run").result()
    assert (summary.status, summary.steps) == ("done", 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "stage"),
    [
        (run_module, "load_data"),
        (run_module, "build"),
        (programs, "lower"),
        (programs, "compile_programs"),
        (run_module, "plan_sinks"),
    ],
)
@pytest.mark.mlp
def test_signal_before_training_ends_the_run_as_stopped(
    module: Any, stage: str, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is lost, since none was done; the same command does them."""
    original = getattr(module, stage)
    monkeypatch.setattr(module, stage, sending(signal.SIGTERM, original))
    summary = run(tiny(), tmp_path / "run")
    assert (summary.status, summary.exit_status) == ("stopped", 75)
    assert (summary.reason, summary.steps) == ("SIGTERM received", 0)
    assert outcome.read_summary(tmp_path / "run")["status"] == "stopped"
    said = (tmp_path / "run" / "run.log").read_text().splitlines()[-1]
    assert said.endswith(f"stopped    SIGTERM received; {tmp_path / 'run'}")
    monkeypatch.setattr(module, stage, original)
    assert run(tiny(f"train.resume={tmp_path / 'run'}")).status == "done"


def sending(number: signal.Signals, call: Callable[..., Any]) -> Callable[..., Any]:
    def send(*args: Any, **named: Any) -> Any:
        signal.raise_signal(number)
        return call(*args, **named)

    return send


EVALUATING = ["eval.every_steps=10", "train.dispatch_seconds=1e-6", "checkpoint.keep=1"]
"""An evaluation is three dispatches of a batch each."""
KEPT_BY_ACCURACY = [*EVALUATING, "checkpoint.best=accuracy"]
ENDED_EARLY = [*KEPT_BY_ACCURACY, "monitor.early_stop={metric: accuracy, patience: 1}"]


class Evaluations:
    """Sends a signal after one dispatch of the evaluation of one step; counts the dispatches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[tuple[int, int]] = []
        self.number, self.at, self.after = signal.SIGTERM, -1, 0
        original = XlaExecutable.evaluate

        def go(made: XlaExecutable, state: Any, start: int, stop: int, before: Any = None) -> Any:
            sums = original(made, state, start, stop, before)
            self.batches.append((int(state.step), stop))
            if self.batches[-1] == (self.at, self.after):
                self.at = -1
                signal.raise_signal(self.number)
            return sums

        monkeypatch.setattr(XlaExecutable, "evaluate", go)

    def send(self, number: signal.Signals, at: int, after: int) -> None:
        """Send this signal after dispatch `after` of the next evaluation of step `at`."""
        self.number, self.at, self.after, self.batches = number, at, after, []


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Evaluations:
    return Evaluations(monkeypatch)


BEST_AT_30 = ["model=mlp", "model.hidden=[16]", "train.optimizer.lr=0.05", "seed=4"]
"""A network whose accuracy rises to step 20, is equal at step 30 and lower at step 40."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [[*BEST_AT_30, *KEPT_BY_ACCURACY], [*BEST_AT_30, *ENDED_EARLY]],
    ids=["to the end", "early"],
)
def test_evaluation_stopped_by_a_signal_is_done_on_resume(
    arguments: list[str], tiny: Compose, tmp_path: Path, evaluations: Evaluations
) -> None:
    """Abandoned after the current dispatch, twice; then all is as in an unbroken run."""
    ends_early = ENDED_EARLY[-1] in arguments
    whole = run(tiny(*arguments), tmp_path / "unbroken")
    run_dir = tmp_path / "run"
    for life, after in enumerate([2, 1]):
        evaluations.send(signal.SIGTERM, at=30, after=after)
        again = [f"train.resume={run_dir}"] if life else []
        summary = run(tiny(*arguments, *again), None if life else run_dir)
        assert (summary.status, summary.reason) == ("stopped", "SIGTERM received")
        assert summary.steps == outcome.checkpoints(run_dir)[-1] == 30
        assert evaluations.batches[-after:] == [(30, n + 1) for n in range(after)]
        assert outcome.read_lines(run_dir / "evals.jsonl")[-1]["step"] == 20
    # One that ends early is over there; the other is broken once more after the best.
    evaluations.send(signal.SIGINT, at=40, after=1)
    ends = [run(tiny(*arguments, f"train.resume={run_dir}")).status for _ in range(2)]
    assert ends == (["done", "done"] if ends_early else ["stopped", "done"])
    assert outcome.read_summary(run_dir)["metrics"] == whole.metrics
    assert outcome.read_summary(run_dir)["reason"] == whole.reason
    outcome.assert_same_run(run_dir, tmp_path / "unbroken")
    assert outcome.checkpoints(run_dir) == ([30] if ends_early else [30, 45])


@pytest.mark.slow
@pytest.mark.mlp
def test_signal_in_an_evaluation_at_the_last_step_stops_the_run(
    tiny: Compose, tmp_path: Path, evaluations: Evaluations
) -> None:
    """The one between steps and that of the stage `eval` are the same one there."""
    arguments = [
        "train.steps=20",
        *KEPT_BY_ACCURACY,
        "stages=[data,build,compile,train,checkpoint]",
    ]
    run(tiny(*arguments), tmp_path / "unbroken")
    evaluations.send(signal.SIGTERM, at=20, after=1)
    summary = run(tiny(*arguments), tmp_path / "run")
    assert (summary.status, summary.exit_status, summary.steps) == ("stopped", 75, 20)
    assert run(tiny(*arguments, f"train.resume={tmp_path / 'run'}")).status == "done"
    outcome.assert_same_run(tmp_path / "run", tmp_path / "unbroken")


@pytest.mark.slow
@pytest.mark.mlp
def test_save_signal_in_an_evaluation_is_handled_after_it(
    tiny: Compose, tmp_path: Path, evaluations: Evaluations
) -> None:
    evaluations.send(signal.SIGUSR1, at=10, after=1)
    assert run(tiny(*EVALUATING, "checkpoint.keep=5"), tmp_path).status == "done"
    assert evaluations.batches[:3] == [(10, 1), (10, 2), (10, 3)]
    assert outcome.checkpoints(tmp_path) == [10, 45]


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.mlp
def test_signal_in_the_last_evaluation_loses_no_step(
    after: int, tiny: Compose, tmp_path: Path, evaluations: Evaluations
) -> None:
    """It ends after the current dispatch."""
    evaluations.send(signal.SIGINT, at=45, after=after)
    summary = run(tiny("train.dispatch_seconds=1e-6"), tmp_path)
    assert (summary.status, summary.reason, summary.steps) == ("stopped", "SIGINT received", 45)
    assert evaluations.batches[-1] == (45, after)
    assert outcome.checkpoints(tmp_path) == [45]
    summary = run(tiny(f"train.resume={tmp_path}"))
    assert (summary.status, summary.steps) == ("done", 45)
    assert "accuracy" in summary.metrics


SAVING = ["checkpoint.every_steps=10", "train.sink=false"]


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checkpoint is still being written when what follows its step is over."""
    original = checkpointer.write_manifest

    def write(*args: Any) -> None:
        time.sleep(0.3)
        original(*args)

    monkeypatch.setattr(checkpointer, "write_manifest", write)


def interrupt(error: BaseException | None) -> None:
    if error is not None:
        raise error
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize(
    "error",
    [RuntimeError("no memory"), SystemExit(3), KeyboardInterrupt(), None],
    ids=["an exception", "sys.exit", "an interrupt", "two signals"],
)
@pytest.mark.mlp
def test_pending_checkpoint_is_saved_however_the_run_ends(
    error: BaseException | None, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = XlaExecutable.run

    def go(self: XlaExecutable, state: Any, start: int, *more: Any) -> Any:
        if start == 10:
            interrupt(error)
        return original(self, state, start, *more)

    monkeypatch.setattr(XlaExecutable, "run", go)
    if error is None:
        assert run(tiny(*SAVING), tmp_path).reason == "SIGINT received, then SIGINT received"
    else:
        with pytest.raises(type(error)):
            run(tiny(*SAVING), tmp_path)
    assert outcome.checkpoints(tmp_path) == [10]
    verify_files(make_checkpoint_path(tmp_path / "checkpoints", 10))
    status = "failed" if isinstance(error, Exception) else "stopped"
    assert outcome.read_summary(tmp_path)["status"] == status
    assert outcome.read_summary(tmp_path)["exit_status"] == (1 if status == "failed" else 75)


@pytest.mark.slow
def test_sigusr1_saves_and_continues_and_sigterm_saves_and_stops(
    cache: Path, tmp_path: Path
) -> None:
    """A real process in the middle of one long sink."""
    steps = ["train.steps=1_000_000", "train.sink_size=1_000_000", "hydra.run.dir=run"]
    command = [sys.executable, "-m", "pipeline", *TINY, f"cache.root={cache}", *steps]
    run_dir = tmp_path / "run"
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: count_lines(run_dir / "metrics.jsonl") > 1, process)
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: (run_dir / "checkpoints").exists() and one_saved(run_dir), process)
        (first,) = outcome.checkpoints(run_dir)
        done = count_lines(run_dir / "metrics.jsonl")
        wait_until(lambda: count_lines(run_dir / "metrics.jsonl") > done, process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (75, "")
    summary = outcome.read_summary(run_dir)
    last = outcome.metrics(run_dir)[-1]["step"]
    assert (summary["status"], summary["reason"]) == ("stopped", "SIGTERM received")
    assert outcome.checkpoints(run_dir) == [first, last]
    assert summary["steps"] == last
    assert "accuracy" not in summary["metrics"]


def one_saved(run_dir: Path) -> bool:
    return len(outcome.checkpoints(run_dir)) == 1


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_uncaught_interrupt_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: others.append(error))
    replace_interrupt_traceback()
    replace_interrupt_traceback()
    for error in (Interrupted("SIGINT received"), ValueError("x"), KeyboardInterrupt()):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "interrupted: SIGINT received\n"
    assert [type(error) for error in others] == [ValueError, KeyboardInterrupt]
