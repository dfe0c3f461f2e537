"""Logs of a run as arrays: one for each name that a line has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import DataError
from pipeline.engine.monitors.log_lines import read_lines

MAX_NAMES = 1000
"""Names in the lines of a log: without a bound, lines of other names each would fill the memory."""


def read_arrays(log: Path) -> dict[str, np.ndarray]:
    """The numbers of a log by name, `step` among them, float64 (lines,); {} without the file.

    NaN stands for a value that is missing, is not finite or is no number; a metric with a value for
    each class has its macro average. Raises DataError for a file that is no log, and for one of
    more than `MAX_NAMES` names.
    """
    if not log.exists():
        return {}
    rows: list[dict[str, Any]] = []
    names: dict[str, None] = {}
    for line in read_lines(log):
        names |= dict.fromkeys((*line.fields, "step"))
        if len(names) > MAX_NAMES:
            raise DataError(f"{line.where}: has more than {MAX_NAMES:,} names by then; is no log")
        rows.append({**line.fields, "step": line.step})
    return {key: np.array([_number(row.get(key)) for row in rows]) for key in names}


def _number(value: Any) -> float:
    if isinstance(value, Mapping):
        value = value.get("macro")
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")
