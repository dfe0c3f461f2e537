"""JSON that every reader takes: what is no finite number is null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, indent: int | None = None) -> str:
    """`value` as JSON; NaN and infinities, which JSON can't say, become null."""
    return json.dumps(_sayable(value), indent=indent, allow_nan=False)


def _sayable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sayable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
