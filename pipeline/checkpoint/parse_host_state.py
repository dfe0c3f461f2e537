"""Parser of the host's state in a checkpoint.

A checkpoint with a valid manifest may still come from a stranger, so values that this program
doesn't write are refused. Unknown keys are ignored. The parser has its own module, since the engine
uses the types of `host_state` without pydantic.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.checkpoint.host_state import HostState
from pipeline.core.files.value_text import show

MAX_DIGITS = 308
"""An integer of at most this many digits fits into a float64, whose largest is 1.8e308."""


def parse_host_state(data: Any) -> HostState:
    """Parse the JSON of a checkpoint's host state. Raises ValueError with the first wrong key."""
    try:
        # A longer integer stays a text, which its field refuses.
        tree = json.loads(
            json.dumps(data),
            parse_int=lambda digits: int(digits) if len(digits) <= MAX_DIGITS else digits,
        )
        return _make_schema().validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        if problem["type"] == "missing":
            raise ValueError(f"{key} is missing") from error
        raise ValueError(f"{key or 'all'} = {show(problem['input'])}") from error


@cache
def _make_schema() -> TypeAdapter[HostState]:
    return TypeAdapter(HostState)
