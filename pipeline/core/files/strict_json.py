"""Writing of strict JSON, in which NaN and infinities are null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.files.atomic_write import convert_write_errors, write_whole


def format_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON; NaN and infinities, which JSON can't represent, become null."""
    return json.dumps(_replace_non_finite(value), indent=indent, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as an indented JSON file, atomically. Raises RunError if the disk refuses."""
    with convert_write_errors(path):
        write_whole(path, format_json(value, indent=1) + "\n")


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
