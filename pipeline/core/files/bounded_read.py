"""Bounded reads of files that anyone may have written: regular files, up to a size limit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20
"""Default size limit. It is for files such as JSON, not for arrays."""
MAX_DEPTH = 64
"""Nesting limit of lists and objects in JSON."""
TOO_DEEP = "is nested too deeply"


def read_bytes(path: Path, at_most_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file.

    Raises OSError if the file can't be read, and ValueError if it is larger than `at_most_bytes` or
    isn't a regular file, since a pipe or a device may never end.
    """
    if path.exists() and not path.is_file():
        raise ValueError("isn't a regular file")
    with path.open("rb") as file:
        # A read allocates the bytes that are requested, so the first requests the file's size.
        first_bytes = min(os.fstat(file.fileno()).st_size, at_most_bytes) + 1
        content = file.read(first_bytes)
        if len(content) == first_bytes:
            content += file.read(at_most_bytes + 1 - first_bytes)
    if len(content) > at_most_bytes:
        raise ValueError(f"has more than {at_most_bytes:,} bytes")
    return content


def read_text(path: Path, at_most_bytes: int = MAX_BYTES) -> str:
    """Return the content of a file in UTF-8. Raises OSError and ValueError as `read_bytes` does."""
    return read_bytes(path, at_most_bytes).decode("utf-8")


def read_json(path: Path, at_most_bytes: int = MAX_BYTES) -> Any:
    """Parse a JSON file. Raises OSError, and ValueError if it isn't valid."""
    return parse_json(read_text(path, at_most_bytes))


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError if it isn't valid or is nested too deeply."""
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    # A document can't be nested more deeply than it has brackets.
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(document, MAX_DEPTH):
        raise ValueError(TOO_DEEP)
    return document


def _is_deeper(document: Any, levels: int) -> bool:
    """Return whether lists and objects are nested more than `levels` deep.

    Functions that walk the document are recursive, and Python allows fewer nested calls than its
    JSON parser allows levels.
    """
    collections = [[document]]
    for _ in range(levels + 1):
        items = [item for collection in collections for item in collection]
        collections = [list(item.values()) for item in items if isinstance(item, dict)]
        collections += [item for item in items if isinstance(item, list)]
    return bool(collections)
