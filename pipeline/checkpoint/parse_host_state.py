"""Parser of the host's state in a checkpoint.

A checkpoint with a valid manifest may still come from a stranger, so values that this program
doesn't write are refused. Unknown keys are ignored. The parser isn't in `host_state`, since the
engine uses the types there without importing pydantic.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.checkpoint.host_state import MAX_DIGITS, HostState
from pipeline.core.files.value_text import show


def parse_host_state(data: Any) -> HostState:
    """Make a host state of the JSON in a checkpoint. Raises ValueError with the first wrong key."""
    try:
        tree = json.loads(json.dumps(data), parse_int=_parse_integer)
        return TypeAdapter(HostState).validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        if problem["type"] == "missing":
            raise ValueError(f"{key} is missing") from error
        raise ValueError(f"{key or 'all'} = {show(problem['input'])}") from error


def _parse_integer(digits: str) -> int | str:
    """Return an integer. One that is too long stays a text, which validation refuses."""
    return int(digits) if len(digits.lstrip("-")) <= MAX_DIGITS else digits
