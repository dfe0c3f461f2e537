"""Files with a JSON object on each line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Suffixes of such files."""
PACKED = (".gz", ".zip")
"""Suffixes of compressed files, after the suffix of their content."""


def get_content_suffix(path: Path) -> str:
    """Return the suffix of a file's content in lower case: .csv of rows.csv and of rows.csv.gz."""
    is_packed = path.suffix.lower() in PACKED
    return Path(path.stem if is_packed else path.name).suffix.lower()


def holds_json_lines(path: Path) -> bool:
    """Return whether a file has a name of such files, as rows.jsonl and rows.jsonl.gz do."""
    return get_content_suffix(path) in JSON_LINES


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
            raise ValueError(
                f"line {number:,} isn't JSON: {error}; must have an object on each line"
            ) from error
        if not isinstance(document, dict):
            rule = f"; must have {', '.join(columns)}" if columns else " of named values"
            hint = "; a list of objects must have each on its own line" * isinstance(document, list)
            raise ValueError(f"line {number:,} isn't an object{rule}{hint}")
        yield number, document
