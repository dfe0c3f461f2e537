"""One case: what it came to, and what it left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, get_args

from pipeline.core.errors import DataError, PipelineError

Outcome = Literal[
    "success",
    "recipe error",
    "data error",
    "run error",
    "traceback",
    "hang",
    "unclear message",
    "partial output",
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
DEFECTS: tuple[Outcome, ...] = ("traceback", "hang", "unclear message", "partial output")

MAX_MESSAGE_LINES = 120
UNFINISHED = ("*.part", "*.tmp", "*orbax-checkpoint-tmp*")

Act = Callable[[Random, Path], None]
"""Makes what is wrong, in an empty folder that is the working folder too, and hands it to the
program. What it raises is judged."""


@dataclass(frozen=True)
class Judged:
    """An outcome, and what a defect consists of."""

    outcome: Outcome
    detail: str = ""


class TimedOut(BaseException):
    """Raised by the clock; no handler of errors stops it."""


def judge(act: Act, rng: Random, folder: Path, timeout_s: float) -> Judged:
    """Carry a case out in `folder` and say what became of it."""
    os.chdir(folder)
    noise = io.StringIO()
    try:
        with (
            _limited(timeout_s),
            contextlib.redirect_stdout(noise),
            contextlib.redirect_stderr(noise),
        ):
            act(rng, folder)
        found = Judged("success")
    except TimedOut:
        return Judged("hang", traceback.format_exc(limit=-6))
    except (PipelineError, SystemExit) as error:
        found = _judge_error(error)
    except BaseException:
        return Judged("traceback", traceback.format_exc(limit=-12))
    left = left_behind(folder)
    return Judged("partial output", left) if left else found


def _judge_error(error: PipelineError | SystemExit) -> Judged:
    message = str(error)
    if isinstance(error, SystemExit):
        outcomes: dict[object, Outcome] = {None: "success", 0: "success", 2: "recipe error"}
        return Judged(outcomes.get(error.code, "traceback"), f"exit {error.code}")
    if not message.strip() or message.count("\n") > MAX_MESSAGE_LINES:
        return Judged("unclear message", message[:2000])
    if not all(line.isprintable() for line in message.split("\n")):
        return Judged("unclear message", repr(message[:2000]))
    if isinstance(error, DataError):
        return Judged("data error")
    return Judged("recipe error" if error.exit_status == 2 else "run error")


def left_behind(folder: Path) -> str:
    """What is there and should not be: drafts, runs without a summary. Empty where nothing is."""
    drafts = [path for pattern in UNFINISHED for path in folder.rglob(pattern)]
    if drafts:
        return f"left {drafts[0]}"
    for recipe in folder.rglob("recipe.yaml"):
        summary = recipe.with_name("summary.json")
        try:
            status = json.loads(summary.read_text())["status"]
        except (OSError, ValueError, KeyError) as error:
            return f"{summary}: {error!r}"
        if status not in ("done", "failed", "stopped"):
            return f"{summary}: status {status}"
    return ""


@contextlib.contextmanager
def _limited(timeout_s: float) -> Iterator[None]:
    """Seconds of the processor: other processes take the clock's."""

    def ring(*_: object) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
