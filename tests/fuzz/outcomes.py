"""The outcome of a case, and its leftover files."""

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
"""Makes a wrong input in an empty working folder and passes it to the program; its error is
judged."""


@dataclass(frozen=True)
class Judged:
    """An outcome, and the details of a defect."""

    outcome: Outcome
    detail: str = ""


class TimedOut(BaseException):
    """Raised by the timer; no handler of errors catches it."""


def judge(act: Act, rng: Random, folder: Path, timeout_s: float) -> Judged:
    """Run a case in `folder` and return its outcome."""
    os.chdir(folder)
    noise = io.StringIO()
    try:
        with (
            _limit_time(timeout_s),
            contextlib.redirect_stdout(noise),
            contextlib.redirect_stderr(noise),
        ):
            act(rng, folder)
        judged = Judged("success")
    except TimedOut:
        return Judged("hang", traceback.format_exc(limit=-6))
    except (PipelineError, SystemExit) as error:
        judged = _judge_error(error)
    except BaseException:
        return Judged("traceback", traceback.format_exc(limit=-12))
    leftover = find_leftover(folder)
    return Judged("partial output", leftover) if leftover else judged


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


def find_leftover(folder: Path) -> str:
    """Return a draft or a run without a summary that shouldn't be there, or an empty text."""
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
def _limit_time(timeout_s: float) -> Iterator[None]:
    """Limit the processor time; other processes would use up time of the clock."""

    def ring(*_: object) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
