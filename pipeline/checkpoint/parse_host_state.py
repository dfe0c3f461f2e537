"""Parser of the host's state in a checkpoint.

A checkpoint may come from a stranger, whose manifest matches: values that this program doesn't
write are refused. Unknown keys are ignored. The parser has its own module since the engine, which
uses the types of `host_state`, loads no pydantic.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.checkpoint.host_state import HostState
from pipeline.core.files.value_text import show

MAX_DIGITS = 308
"""Digits of a whole number that a float can hold."""


def parse_host_state(data: Any) -> HostState:
    """Parse the JSON of a checkpoint's host state. Raises ValueError with the first wrong key."""
    try:
        tree = json.loads(json.dumps(data), parse_int=_int_or_text)
        return _schema().validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ValueError(f"{key} is missing") from error
        raise ValueError(f"{key or 'all'} = {show(first['input'])}") from error


def _int_or_text(digits: str) -> int | str:
    """Return a whole number; its text if no float can hold it, so that its field refuses it."""
    return int(digits) if len(digits) <= MAX_DIGITS else digits


@cache
def _schema() -> TypeAdapter[HostState]:
    return TypeAdapter(HostState)
