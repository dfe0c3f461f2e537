"""Reader of the lines of metrics.jsonl, evals.jsonl and scalars.jsonl, perhaps a stranger's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipeline.core.errors import DataError

METRICS, EVALS, SCALARS = "metrics.jsonl", "evals.jsonl", "scalars.jsonl"
NUMBERS = ("loss", "learning_rate", "grad_norm", "loss_scale", "skipped")
"""Keys of a step's numbers in metrics.jsonl."""

LONGEST_BYTES = 16 << 20
"""Longest line of a log: an evaluation has numbers for every class."""
TAIL_BYTES = 4096
"""Bytes that hold the last line of metrics.jsonl."""
MAX_STEP = 2**63 - 1
MAX_NUMBER = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class LogLine:
    """A whole line of a log."""

    text: bytes
    where: str
    """Name of the line, for the user."""
    step: int
    fields: Mapping[str, Any]

    def numbers(self) -> dict[str, float | None]:
        """Return the `NUMBERS` of a step, each a float32; None for one that was not finite.

        Raises DataError where one is no number.
        """
        numbers = {name: self.fields.get(name) for name in NUMBERS}
        if numbers["skipped"] is None:
            numbers["skipped"] = False
        if not all(map(_is_number, numbers.values())):
            raise _no_step(self.where)
        return {name: None if value is None else float(value) for name, value in numbers.items()}


def _is_number(value: Any) -> bool:
    """Whether a value is null or a number in the range of float32; NaN is not."""
    return value is None or (isinstance(value, int | float) and abs(value) <= MAX_NUMBER)


def parse_line(text: bytes, where: str) -> LogLine:
    """Parse a line; `where` names it for the user. Raises DataError for a line of no log."""
    try:
        fields = json.loads(text.decode("utf-8-sig"))
        step = fields["step"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _no_step(where) from error
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise _no_step(where)
    return LogLine(text, where, step, fields)


def _no_step(where: str) -> DataError:
    return DataError(f"{where}: is not a step of a run; remove the file to go without it")


def read_lines(log: Path) -> Iterator[LogLine]:
    """Yield the lines of a log; a last one without newline, left by a killed run, is dropped.

    Raises DataError where there is no file, or none that can be read, and for a line of no log.
    """
    with _opened(log) as file:
        lines = iter(partial(file.readline, LONGEST_BYTES), b"")
        for number, text in enumerate(lines, start=1):
            if not text.endswith(b"\n"):
                break
            yield parse_line(text, f"{log}, line {number}")


def last_step(log: Path) -> int | None:
    """Return the step of the last whole line of metrics.jsonl; None without a line or file.

    Raises DataError where it can't be read, or that line is of no log.
    """
    if not log.exists():
        return None
    with _opened(log) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).split(b"\n")[:-1]
    return parse_line(lines[-1], f"{log}, last line").step if lines else None


@contextmanager
def _opened(log: Path) -> Iterator[BinaryIO]:
    if log.exists() and not log.is_file():
        raise DataError(f"{log}: is no regular file; remove it to go without it")
    try:
        with log.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"{log}: can't be read: {error.strerror}") from error
