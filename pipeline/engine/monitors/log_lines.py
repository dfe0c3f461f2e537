"""Lines of a run's logs: the levels of messages that are shown, and the flaws of metrics.jsonl,
evals.jsonl and scalars.jsonl, which may have been edited."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.value_text import show
from pipeline.core.reporter import Reporter
from pipeline.training.telemetry import PLACES

LogPlace = Literal["console", "stderr", "file"]
LEVELS = ("debug", "info", "warning", "error")
"""Names of the levels that GLOG_v numbers from 0 on."""
LEVEL_VARIABLE = "GLOG_v"
STDERR_VARIABLE = "GLOG_logtostderr"
LOGGERS = ("pipeline", "jax")
"""Loggers whose messages are shown."""


def choose_log_settings(
    level: str | None, environment: Mapping[str, str]
) -> tuple[str, LogPlace, list[str]]:
    """Return the least severe level that is shown, the destination besides run.log, and texts about
    variables with invalid values, which are ignored.

    The level is the recipe's `level`, or GLOG_v's if that is None. GLOG_logtostderr=1 sends
    messages to stderr, 0 only to run.log.
    """
    problems = []
    numbers = {**dict(zip("0123", LEVELS, strict=True)), "4": "error"}
    value = environment.get(LEVEL_VARIABLE)
    if level is None and value is not None:
        level = numbers.get(value)
        if level is None:
            problems.append(
                f"{LEVEL_VARIABLE} = {show(value)}: "
                "must be 0 (debug), 1 (info), 2 (warning), 3 or 4"
            )
    to_stderr = environment.get(STDERR_VARIABLE)
    if to_stderr not in (None, "0", "1"):
        problems.append(f"{STDERR_VARIABLE} = {show(to_stderr)}: must be 0 or 1")
    places: Mapping[str | None, LogPlace] = {"1": "stderr", "0": "file"}
    place = places.get(to_stderr, "console")
    return level or "warning", place, problems


class ReporterHandler(logging.Handler):
    """Passes messages on to the reporter of a run."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message with its level."""
        try:
            text = record.getMessage()
        except Exception:  # The arguments don't match the message, which must not end a run.
            self.handleError(record)
            return
        self._reporter.log(record.levelno, record.levelname.lower(), text)


@contextmanager
def log_by_level(reporter: Reporter, level: str | None) -> Iterator[None]:
    """Show messages by the recipe's level and the environment, during the body.

    If the level is debug or info, messages of `LOGGERS` are shown too.
    """
    name, reporter.log_to, problems = choose_log_settings(level, os.environ)
    reporter.level = getattr(logging, name.upper())
    if problems:
        reporter.warn(f"{'; '.join(problems)}; it is ignored")
    with ExitStack() as stack:
        if reporter.level < logging.WARNING:
            handler = ReporterHandler(reporter)
            for logger in LOGGERS:
                stack.enter_context(handle_messages(logger, handler, reporter.level))
        yield


@contextmanager
def handle_messages(name: str, handler: logging.Handler, level: int) -> Iterator[None]:
    """Pass the messages of a logger from `level` on to `handler`, during the body, and not to the
    root, to which absl, which orbax imports, adds a handler."""
    logger = logging.getLogger(name)
    earlier_level = logger.level
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(earlier_level)
        logger.propagate = propagates


METRICS = "metrics.jsonl"
EVALS = "evals.jsonl"
SCALARS = "scalars.jsonl"

LONGEST_BYTES = 16 << 20
"""Largest length of a line; an evaluation has numbers for every class."""
END_BYTES = 4096
"""Bytes at the end of a log that are read first for its last line."""
MAX_STEP = 2**63 - 1
MAX_NUMBER = float(np.finfo(np.float32).max)
MAX_RANGES = 20
"""Largest number of ranges in a list of missing steps."""
Ranges = tuple[tuple[int, int], ...]
"""First and last steps of ranges."""


@dataclass(frozen=True)
class LogLine:
    """A complete line of a log."""

    text: bytes
    where: str
    """Place of the line in messages."""
    step: int
    fields: Mapping[str, Any]

    def numbers(self) -> dict[str, float | None]:
        """Return the numbers of a step by name; None for one that isn't finite, True for a flag.

        Raises DataError for a value that isn't a number in the range of float32.
        """
        numbers = {name: value for name, value in self.fields.items() if name not in PLACES}
        for value in numbers.values():
            is_number = isinstance(value, int | float) and abs(value) <= MAX_NUMBER
            if value is not None and not is_number:
                raise _make_line_error(self.where)
        return numbers


def parse_line(text: bytes, where: str) -> LogLine:
    """Parse a line; `where` is its place in messages. Raises DataError if it isn't valid."""
    try:
        fields = json.loads(text.decode("utf-8-sig"))
        step = fields["step"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _make_line_error(where) from error
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise _make_line_error(where)
    return LogLine(text, where, step, fields)


def _make_line_error(where: str) -> DataError:
    return DataError(f"{where}: isn't a step of a run; remove the file to continue without it")


def read_lines(log: Path) -> Iterator[LogLine]:
    """Yield the complete lines of a log. Raises DataError for an unreadable file or line."""
    with _open_log(log) as file:
        lines = iter(partial(file.readline, LONGEST_BYTES), b"")
        for number, text in enumerate(lines, start=1):
            if not text.endswith(b"\n"):
                break
            yield parse_line(text, f"{log}, line {number}")


def finite_number(value: Any) -> float | None:
    """Return a value of a log or a summary if it is a finite number that a float can hold, else
    None; of a metric by class return the macro average."""
    number = value.get("macro") if isinstance(value, Mapping) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return number if abs(number) <= sys.float_info.max else None


def read_last_line(log: Path, last: int = MAX_STEP) -> LogLine | None:
    """Return the last complete line of metrics.jsonl whose step is at most `last`; None without
    one. Raises DataError if the file can't be read or a line isn't valid."""
    if not log.exists():
        return None
    with _open_log(log) as file:
        size_bytes = start = file.seek(0, os.SEEK_END)
        while start and size_bytes - start < LONGEST_BYTES:
            start = max(0, min(start - END_BYTES, 2 * start - size_bytes))
            file.seek(start)
            lines = file.read().split(b"\n")[:-1]
            for text in reversed(lines[1:] if start else lines):  # The first may be a part of one.
                if (line := parse_line(text, f"{log}, last line")).step <= last:
                    return line
    return None


def last_step(log: Path) -> int | None:
    """Return the step of the line that `read_last_line` returns, with its errors; None without a
    line."""
    line = read_last_line(log)
    return None if line is None else line.step


@contextmanager
def _open_log(log: Path) -> Iterator[BinaryIO]:
    if log.exists() and not log.is_file():
        raise DataError(f"{log}: isn't a regular file; remove it to continue without it")
    try:
        with log.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"{log}: can't be read: {error.strerror}") from error


@dataclass(frozen=True)
class Flaws:
    """Differences between a log and what its run wrote. All later checkpoints store them."""

    missing: Ranges = ()
    """The first `MAX_RANGES` ranges of missing steps."""
    missing_lines: int = 0
    """Number of missing lines."""
    verified: bool = True
    """Whether the remaining lines are as they were written."""

    def __bool__(self) -> bool:
        return not self.verified or self.missing_lines > 0

    def __str__(self) -> str:
        if not self.missing_lines:
            return "some of its lines differ from what was written"
        count = "a line is" if self.missing_lines == 1 else f"{self.missing_lines:,} lines are"
        ranges = f": {format_steps(self.missing)}" if self.missing else ""
        ending = ", ..." if len(self.missing) == MAX_RANGES else ""
        return f"{count} missing{ranges}{ending}"


NO_FLAWS = Flaws()


def find_ranges(steps: AbstractSet[int]) -> Ranges:
    """Return the first `MAX_RANGES` ranges of successive steps."""
    starts = sorted(step for step in steps if step - 1 not in steps)
    ends = sorted(step for step in steps if step + 1 not in steps)
    return tuple(zip(starts, ends, strict=True))[:MAX_RANGES]


def format_steps(ranges: Ranges) -> str:
    """Return ranges of steps as text: `step 3, steps 7 to 9`."""
    return ", ".join(
        f"step {first}" if first == last else f"steps {first} to {last}" for first, last in ranges
    )
