"""Parser of the host's state in a checkpoint.

A checkpoint may come from a stranger, with a manifest to match: anything that this program doesn't
write is refused. It is apart from the types because the engine, which uses them, loads no pydantic.
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
    """Parse the JSON of a checkpoint's host state. Raises ValueError naming a key."""
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
    """Return a whole number, as a text if it is beyond every float: no field takes that."""
    return int(digits) if len(digits) <= MAX_DIGITS else digits


@cache
def _schema() -> TypeAdapter[HostState]:
    return TypeAdapter(HostState)
