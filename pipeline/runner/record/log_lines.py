"""The lines of metrics.jsonl and evals.jsonl, as they are read back, whoever wrote them."""

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

from pipeline.errors import DataError

METRICS, EVALS = "metrics.jsonl", "evals.jsonl"
NUMBERS = ("loss", "learning_rate", "grad_norm", "loss_scale", "skipped")
"""What a step leaves behind, besides where it stands."""

LONGEST_BYTES = 16 << 20
"""A line of an evaluation tells of every class; a longer one is no line of a log."""
TAIL_BYTES = 4096
"""The last line of metrics.jsonl is shorter than that."""
MAX_STEP = 2**63 - 1
MAX_NUMBER = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class LogLine:
    """A whole line of a log."""

    text: bytes
    where: str
    """Which one it is, for the user."""
    step: int
    fields: Mapping[str, Any]

    def numbers(self) -> dict[str, float | None]:
        """The `NUMBERS` of a step, each a float32; None for one that was not finite.

        Raises DataError where they are no numbers.
        """
        found = {name: self.fields.get(name) for name in NUMBERS}
        if found["skipped"] is None:
            found["skipped"] = False
        if not all(map(_is_number, found.values())):
            raise _no_step(self.where)
        return {name: None if value is None else float(value) for name, value in found.items()}


def _is_number(value: Any) -> bool:
    """Whether a number is in the range of float32; NaN is in none, and null stands for it."""
    return value is None or (isinstance(value, int | float) and abs(value) <= MAX_NUMBER)


def parse_line(text: bytes, where: str) -> LogLine:
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
    """The lines of a log up to one without an end, which a run that was killed may have left.

    Raises DataError where there is no file, or none that can be read, and for a line of no log.
    """
    with _opened(log) as file:
        lines = iter(partial(file.readline, LONGEST_BYTES), b"")
        for number, text in enumerate(lines, start=1):
            if not text.endswith(b"\n"):
                break
            yield parse_line(text, f"{log}, line {number}")


def last_step(log: Path) -> int | None:
    """The step of the last whole line of metrics.jsonl; None where there is no line or no file.

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
