"""Samples of a run's logs: a few lines, evenly spread over the file, whatever its length."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.engine.monitors.log_lines import LogLine, parse_line

POINTS = 48
"""Points of a curve at most."""
LONGEST_LINE_BYTES = 1 << 20
"""Longer lines, of evaluations with very many classes, are passed over."""
STEP_NAMES = ("loss", "learning_rate", "grad_norm")


@dataclass(frozen=True)
class LoggedCurve:
    """Values at steps."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


def sample_steps(log: Path) -> Mapping[str, LoggedCurve]:
    """Sample metrics.jsonl: curves of loss, learning rate and norm of the gradient."""
    return _curves(_sampled_lines(log), STEP_NAMES)


def sample_evaluations(log: Path) -> Mapping[str, LoggedCurve]:
    """Sample evals.jsonl: a curve of every metric that is one number, or has a macro average."""
    return _curves(_sampled_lines(log), None)


def _curves(lines: list[LogLine], names: tuple[str, ...] | None) -> Mapping[str, LoggedCurve]:
    points: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.fields.items():
            number = value.get("macro") if isinstance(value, dict) else value
            wanted = name in names if names is not None else name not in ("step", "count")
            if not wanted or isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if abs(number) <= sys.float_info.max:
                points.setdefault(name, {})[line.step] = float(number)
    return {name: LoggedCurve(tuple(at), tuple(at.values())) for name, at in points.items()}


def _sampled_lines(log: Path) -> list[LogLine]:
    """Return the first, the last and evenly spread lines between, in the order of their steps.

    Raises DataError where it can't be read. Lines of no log are passed over.
    """
    try:
        with log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            texts = dict.fromkeys(_texts(file, size))
    except OSError as error:
        raise DataError(f"{log}: can't be read: {error.strerror}") from error
    lines = []
    for text in texts:
        try:
            lines.append(parse_line(text, str(log)))
        except DataError:
            continue
    return sorted(lines, key=lambda line: line.step)


def _texts(file: object, size: int) -> Iterator[bytes]:
    """Yield whole lines: all of a short log, else those that follow evenly spread places."""
    read = file.readline  # type: ignore[attr-defined]
    seek = file.seek  # type: ignore[attr-defined]
    first = read(LONGEST_LINE_BYTES)
    if first.endswith(b"\n"):
        yield first
    if size <= len(first) * POINTS:
        while (text := read(LONGEST_LINE_BYTES)).endswith(b"\n"):
            yield text
        return
    for number in range(1, POINTS):
        # The line in which the place lies has begun before it.
        seek(min(len(first) + (size - len(first)) * number // (POINTS - 1), size - 1))
        read(LONGEST_LINE_BYTES)
        text = read(LONGEST_LINE_BYTES)
        if text.endswith(b"\n"):
            yield text
    tail = min(size, max(4 * len(first), 4096))
    seek(size - tail)
    whole = file.read(tail).split(b"\n")[:-1]  # type: ignore[attr-defined]
    if whole:
        yield whole[-1] + b"\n"
