"""Reading files that anyone may have written: regular files alone, and no more than so much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20
"""Of a file of descriptions, such as JSON; what holds arrays has bounds of its own."""


def read_bytes(path: Path, at_most_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file.

    Raises OSError where it can't be read, and ValueError for what is larger, or is no regular file:
    a pipe or a device may never end.
    """
    if path.exists() and not path.is_file():
        raise ValueError("is no regular file")
    with path.open("rb") as file:
        content = file.read(at_most_bytes + 1)
    if len(content) > at_most_bytes:
        raise ValueError(f"has more than {at_most_bytes:,} bytes")
    return content


def read_text(path: Path, at_most_bytes: int = MAX_BYTES) -> str:
    """The content of a file in UTF-8. Raises OSError and ValueError as `read_bytes` does."""
    return read_bytes(path, at_most_bytes).decode("utf-8")


def read_json(path: Path, at_most_bytes: int = MAX_BYTES) -> Any:
    """What a JSON file holds. Raises OSError, and ValueError for whatever is wrong with it."""
    try:
        return json.loads(read_text(path, at_most_bytes))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
