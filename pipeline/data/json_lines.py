"""Files with a JSON object on each line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

JSON_LINES = (".jsonl", ".ndjson")
"""Suffixes of such files."""


def parse_objects(
    lines: Iterable[str], columns: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line that isn't empty, from 1, and its object. Raises ValueError for
    a line that isn't an object; it must have `columns`."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number:,} isn't JSON: {error}") from error
        if not isinstance(document, dict):
            rule = f"; must have {', '.join(columns)}" if columns else " of named values"
            raise ValueError(f"line {number:,} isn't an object{rule}")
        yield number, document
