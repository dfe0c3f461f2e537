"""Signals at random moments of commands, from the moment that they are handled.

Each command must end with 75, or 0 if it was done already, without a traceback. A run directory
that has a recipe must have a summary that says so, and every tenth is resumed to its end.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests import outcome
from tests.conftest import TINY
from tests.forked import run_forked, start_forked

MLP = [*TINY, "model=mlp"]
SHORT = [*MLP, "model.hidden=[16]", "train.steps=400"]
SINKS = "train.sink_size=100"
SCENARIOS = {
    "run": [*SHORT, SINKS, "checkpoint.every_steps=50"],
    "one dispatch a step": [*SHORT, "train.sink=false", "eval.every_steps=50"],
    "evaluations": [*SHORT, SINKS, "eval.every_steps=10", "++dataset.eval_size=2000"],
    "checkpoints": [*SHORT, "checkpoint.every_steps=4", "train.sink_size=4"],
    "new program": [*MLP, "model.hidden=[{draw}]", "train.steps=400", SINKS],
    "sweep": ["-m", *SHORT, SINKS, "train.optimizer.lr=0.01,0.02,0.03"],
}
"""Arguments by the name of the scenario; `{draw}` is another number in each run."""
PATTERNS = (
    ("SIGTERM",),
    ("SIGINT",),
    ("SIGHUP",),
    ("SIGTERM", "SIGTERM"),
    ("SIGINT", "SIGINT"),
    ("SIGHUP", "SIGTERM"),
    ("SIGTERM", "SIGHUP"),
    ("SIGTERM", "SIGINT", "SIGTERM"),
)
EARLY_SHARE = 0.6
"""Share of the signals that come before the first step."""
PATIENCE_S = 120.0
POLL_S = 0.002
RESUMED_EVERY = 10
FAULTS = ("Traceback", "Exception ignored", "Error:", "error:", "Fatal Python")


@dataclass
class Row:
    """What happened to the signals of a scenario in a stage."""

    num_sent: int = 0
    seconds: list[float] = field(default_factory=list)
    """Seconds from the last signal to the end of each process."""
    defects: list[str] = field(default_factory=list)
    num_done: int = 0
    num_resumed: int = 0


@dataclass(frozen=True)
class Case:
    """A command that gets signals."""

    number: int
    scenario: str
    pattern: Sequence[str]
    delay_s: float
    """Seconds from the moment that signals are handled to the first signal."""
    gap_s: float
    """Seconds between two signals."""
    draw: int

    def arguments(self, cache: Path) -> list[str]:
        """Return the arguments of the command."""
        words = [word.replace("{draw}", str(self.draw)) for word in SCENARIOS[self.scenario]]
        flags = [word for word in words if word == "-m"]
        return [*flags, "+recipe=lenet5_digits", *words[len(flags) :], f"cache.root={cache}"]


def send_signals(count: int, seed: int, num_processes: int) -> dict[tuple[str, str], Row]:
    """Send signals to `count` commands, and return the rows by stage and signals."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and commands inherit that
    draw = random.Random(seed)
    rows: dict[tuple[str, str], Row] = defaultdict(Row)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = folder / "cache"
        lengths = {scenario: _measure(folder, cache, scenario) for scenario in SCENARIOS}
        cases = [_draw_case(number, draw, lengths) for number in range(count)]
        with ThreadPoolExecutor(num_processes) as threads:
            for case, stage, row in threads.map(partial(_try_case, folder, cache), cases):
                total = rows[stage, ", ".join(case.pattern)]
                total.num_sent += row.num_sent
                total.seconds += row.seconds
                total.defects += row.defects
                total.num_done += row.num_done
                total.num_resumed += row.num_resumed
                for defect in row.defects:
                    print(f"case {case}: {defect}", flush=True)
                if case.number % 50 == 49:
                    print(f"{case.number + 1} of {count}", flush=True)
    return rows


def print_rows(rows: dict[tuple[str, str], Row]) -> None:
    """Print a line for each stage and sequence of signals."""
    print(
        f"{'last line before':<18} {'signals':<26} {'n':>5} {'done':>5} {'resumed':>7} "
        f"{'p50 s':>6} {'max s':>6} {'defects':>7}"
    )
    for (stage, pattern), row in sorted(rows.items()):
        seconds = sorted(row.seconds)
        print(
            f"{stage:<18} {pattern:<26} {row.num_sent:>5} {row.num_done:>5} "
            f"{row.num_resumed:>7} {seconds[len(seconds) // 2]:>6.2f} {seconds[-1]:>6.2f} "
            f"{len(row.defects):>7}"
        )
    print(
        f"in all: {sum(row.num_sent for row in rows.values())} signals to "
        f"{sum(len(row.seconds) for row in rows.values())} commands, "
        f"{sum(len(row.defects) for row in rows.values())} defects"
    )


def _measure(folder: Path, cache: Path, scenario: str) -> tuple[float, float]:
    """Return the seconds from the moment that signals are handled to the first step, and to the
    end of a command without signals."""
    case = Case(-1, scenario, (), 0.0, 0.0, 8)
    place = folder / f"unbroken_{scenario}"
    process = _start(case, place, cache)
    handled_at = _wait_until_handled(process)
    first_s = None
    while process.exitcode is None and time.monotonic() < handled_at + PATIENCE_S:
        if first_s is None and any(log.stat().st_size for log in place.rglob("metrics.jsonl")):
            first_s = time.monotonic() - handled_at
        time.sleep(POLL_S)
    length_s = time.monotonic() - handled_at
    assert process.exitcode == 0, _read_output(place)
    return first_s or length_s, length_s


def _draw_case(number: int, draw: random.Random, lengths: dict[str, tuple[float, float]]) -> Case:
    scenario = draw.choice(list(SCENARIOS))
    first_s, length_s = lengths[scenario]
    is_early = draw.random() < EARLY_SHARE
    delay_s = draw.uniform(0.0, first_s if is_early else length_s)
    pattern = draw.choice(PATTERNS)
    return Case(number, scenario, pattern, delay_s, draw.uniform(0.0, 0.8), draw.randrange(9, 500))


def _try_case(folder: Path, cache: Path, case: Case) -> tuple[Case, str, Row]:
    """Send the signals of a case. Return it, the stage in which they came, and what happened."""
    place = folder / f"case_{case.number}"
    row = Row()
    process = _start(case, place, cache)
    handled_at = _wait_until_handled(process)
    time.sleep(max(0.0, handled_at + case.delay_s - time.monotonic()))
    stage = _find_stage(place)
    for position, name in enumerate(case.pattern):
        time.sleep(case.gap_s if position else 0.0)
        if process.exitcode is None and process.pid is not None:
            # The process may end in between.
            with suppress(ProcessLookupError):
                os.kill(process.pid, getattr(signal, name))
                row.num_sent += 1
    sent_at = time.monotonic()
    process.join(PATIENCE_S)
    row.seconds.append(time.monotonic() - sent_at)
    if process.exitcode is None:
        row.defects.append(f"no end within {PATIENCE_S:g} s")
        process.kill()
        process.join()
        return case, stage, row
    row.num_done += process.exitcode == 0
    row.defects += _find_defects(case, place, process.exitcode)
    if case.number % RESUMED_EVERY == 0 and process.exitcode == 75:
        row.defects += _resume(case, place, cache)
        row.num_resumed += 1
    return case, stage, row


def _find_defects(case: Case, place: Path, status: int) -> list[str]:
    text = _read_output(place)
    defects = []
    if status not in (0, 75):
        defects.append(f"exit status {status}: {text[-500:]}")
    defects += [f"prints {fault}: {text[-1500:]}" for fault in FAULTS if fault in text]
    for recipe in place.glob("outputs/**/recipe.yaml"):
        run_dir = recipe.parent
        if case.scenario == "sweep":
            continue
        if not (run_dir / "summary.json").exists():
            defects.append(f"no summary: {text[-500:]}")
            continue
        summary = outcome.read_summary(run_dir)
        if (summary["status"], summary["exit_status"]) not in (("stopped", 75), ("done", 0)):
            defects.append(f"status {summary['status']}, {summary['exit_status']}")
        if summary["status"] == "stopped" and "stopped" not in text:
            defects.append(f"stopped without a line: {text[-500:]}")
    return defects


def _resume(case: Case, place: Path, cache: Path) -> list[str]:
    """Run the command again, with `train.resume=auto`; it must be done."""
    words = [*case.arguments(cache), "train.resume=auto"]
    ended = run_forked(words, place, os.environ)
    if ended.returncode != 0:
        return [f"resumed: exit status {ended.returncode}: {ended.stdout[-800:]}{ended.stderr}"]
    return []


def _start(case: Case, place: Path, cache: Path) -> ForkServerProcess:
    place.mkdir()
    streams = [place / "out.txt", place / "err.txt"]
    return start_forked(case.arguments(cache), place, os.environ, streams)


def _wait_until_handled(process: ForkServerProcess) -> float:
    """Wait until the process handles SIGTERM; return the time by the monotonic clock."""
    status = Path(f"/proc/{process.pid}/status")
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        lines = status.read_text().splitlines()
        (caught,) = (line.split()[1] for line in lines if line.startswith("SigCgt:"))
        if int(caught, 16) >> (signal.SIGTERM - 1) & 1:
            return time.monotonic()
        time.sleep(POLL_S)
    raise AssertionError("the process handles no signal")


def _find_stage(place: Path) -> str:
    """Return "train" after the first step, else the first word of the last line, or "start"."""
    file = place / "out.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    words = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    has_steps = any(log.stat().st_size for log in place.rglob("metrics.jsonl"))
    is_training = has_steps and words[-1:] and words[-1] in ("compile", "sink", "outlook")
    return "train" if is_training else (words[-1] if words else "start")


def _read_output(place: Path) -> str:
    files = (place / "out.txt", place / "err.txt")
    return "".join(file.read_text() for file in files if file.exists())
