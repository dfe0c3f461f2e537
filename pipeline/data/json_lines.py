"""Files with a JSON object on each line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.core.files.name_text import show_name

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
    a line that isn't an object; the message names `columns`, which aren't looked for."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line.rstrip("\r\n"))
        except (ValueError, RecursionError) as error:
            # A number of too many digits, or lists that are nested too deep, may be JSON.
            problem = f"can't be read: {error}"
            if isinstance(error, json.JSONDecodeError):  # Its text has a number of a line too.
                reason = error.msg.removesuffix(" at")
                problem = f"isn't JSON: {reason} at character {error.colno}"
            raise ValueError(
                f"line {number:,} {problem}; must have an object on each line"
            ) from error
        if not isinstance(document, dict):
            rule = f"; must have {', '.join(columns)}" if columns else " of named values"
            is_list = isinstance(document, list)
            hint = "; a list of objects must have each on its own line" if is_list else ""
            raise ValueError(f"line {number:,} isn't an object{rule}{hint}")
        yield number, document


def require_characters(line: int, name: str, value: Any) -> None:
    """Raise ValueError, beginning with the line, if a value is a text with half of a surrogate
    pair. JSON may have one as an escape, as of an emoji that was cut; UTF-8 can't have it."""
    if not isinstance(value, str) or value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"line {line:,}: {show_name(name)} has \\u{ord(value[error.start]):04x}, half of a "
            "character; must be whole characters"
        ) from error
