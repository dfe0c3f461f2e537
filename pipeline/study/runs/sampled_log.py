"""Sampling of a run's logs: a few lines, evenly spread over the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.core.errors import DataError
from pipeline.engine.monitors.log_lines import LogLine, finite_number, parse_line
from pipeline.training.telemetry import PLACES

MAX_POINTS = 48
"""Most points of a curve, besides the first line."""
MAX_LINE_BYTES = 1 << 20
"""Longest line that is read; evaluations with very many classes may exceed it."""


@dataclass(frozen=True)
class LoggedCurve:
    """A curve: values at steps."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


def sample_log(log: Path) -> Mapping[str, LoggedCurve]:
    """Sample metrics.jsonl or evals.jsonl, and return a curve of every metric by name.

    The value of a metric by class is its macro average. Raises DataError if the log can't be read.
    """
    points: dict[str, dict[int, float]] = {}
    for line in _sample_lines(log):
        for name, value in line.fields.items():
            number = finite_number(value)
            if number is not None and name not in (*PLACES, "count"):
                points.setdefault(name, {})[line.step] = float(number)
    return {
        name: LoggedCurve(tuple(curve), tuple(curve.values())) for name, curve in points.items()
    }


def _sample_lines(log: Path) -> list[LogLine]:
    """Return the first, the last and evenly spread lines between, in the order of their steps.

    Lines that can't be parsed are skipped.
    """
    try:
        with log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            texts = dict.fromkeys(_read_spread_lines(file, size))
    except OSError as error:
        raise DataError(f"{log}: can't be read: {error.strerror}") from error
    lines = []
    for text in texts:
        try:
            lines.append(parse_line(text, str(log)))
        except DataError:
            continue
    return sorted(lines, key=lambda line: line.step)


def _read_spread_lines(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield whole lines: all of a short log, or those that follow evenly spread offsets."""
    first = file.readline(MAX_LINE_BYTES)
    if first.endswith(b"\n"):
        yield first
    if size <= len(first) * MAX_POINTS:
        while (text := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
            yield text
        return
    for number in range(1, MAX_POINTS):
        # The offset is inside a line, so the next one is used.
        file.seek(min(len(first) + (size - len(first)) * number // (MAX_POINTS - 1), size - 1))
        file.readline(MAX_LINE_BYTES)
        text = file.readline(MAX_LINE_BYTES)
        if text.endswith(b"\n"):
            yield text
    tail = min(size, max(4 * len(first), 4096))
    file.seek(size - tail)
    lines = file.read(tail).split(b"\n")[:-1]
    if lines:
        yield lines[-1] + b"\n"
