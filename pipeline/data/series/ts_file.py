"""Files `.ts` of the UCR and UEA archives: a header, then a line for each series.

`@classLabel true A B` or `@targetLabel true` says what the last field of a line is. The fields
before it, separated by colons, are the channels, and a channel has its values separated by commas.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.core.files.bounded_read import read_text
from pipeline.core.files.name_text import show_name
from pipeline.core.host.memory import require_room
from pipeline.data.series.raw_series import RawSeries, require_series
from pipeline.data.tables.raw_table import is_number

MAX_FILE_BYTES = 4 * 2**30
ROOM_PER_BYTE = 4
"""Bytes of memory for each byte of a file: its text, its lines and the numbers."""
COMMENTS = ("#", "%")
_MISSING = ("?", "nan", "")


def read_ts(path: Path, *, needs_labels: bool = True) -> RawSeries:
    """Read a `.ts` file. Raises OSError, and ValueError with the line for a damaged file.

    Without `needs_labels`, series may have none, and those that they have are ignored.
    """
    require_room(ROOM_PER_BYTE * path.stat().st_size, "its series")
    lines = read_text(path, MAX_FILE_BYTES).splitlines()
    header, first = _read_header(lines)
    classes = _find_classes(header)
    if classes is None and needs_labels:
        raise ValueError("has series without labels: @classLabel or @targetLabel must be true")
    values, labels, places = [], [], []
    for number, line in enumerate(lines[first:], start=first + 1):
        if not line.strip() or line.startswith(COMMENTS):
            continue
        *channels, label = line.strip().split(":") + ([""] if classes is None else [])
        label = label.strip()
        try:
            values.append(_parse_channels(channels))
        except ValueError as error:
            raise ValueError(f"line {number:,}: {error}") from error
        if needs_labels and (not label or (classes and label not in classes)):
            listed = f", one of {', '.join(map(show_name, classes[:10]))}" if classes else ""
            raise ValueError(
                f"line {number:,}: ends with {show_name(label)!r}; must be a label{listed}"
            )
        labels.append(label)
        places.append(f"line {number:,}")
    return require_series(RawSeries(tuple(values), tuple(labels), tuple(places)))


def _read_header(lines: list[str]) -> tuple[dict[str, list[str]], int]:
    """Return the words after each key of the header, by key in lower case, and the number of lines
    up to `@data`. Raises ValueError without `@data`."""
    header: dict[str, list[str]] = {}
    for number, line in enumerate(lines):
        text = line.strip()
        if not text or text.startswith(COMMENTS):
            continue
        if not text.startswith("@"):
            break
        key, *words = text[1:].split()
        if key.lower() == "data":
            return header, number + 1
        header[key.lower()] = words
    raise ValueError("isn't a .ts file: it must have a header, which ends with a line @data")


def _find_classes(header: dict[str, list[str]]) -> list[str] | None:
    """Return the classes that a header lists; [] for numbers, None for series without labels.
    Raises ValueError for values with times."""
    if "true" in map(str.lower, header.get("timestamps", [])):
        raise ValueError("has @timeStamps true: values with times can't be read; must be false")
    for key in ("classlabel", "targetlabel"):
        flag, *classes = header.get(key) or ["false"]
        if flag.lower() == "true":
            return classes
    return None


def _parse_channels(channels: list[str]) -> np.ndarray:
    """Return the values of a series, float64 (steps, channels). Raises ValueError for values that
    aren't numbers, and channels of several lengths."""
    if not channels:
        raise ValueError("must have values and a label, separated by a colon")
    columns = []
    for channel in channels:
        texts = [text.strip() for text in channel.split(",")]
        if missing := [step for step, text in enumerate(texts) if text.lower() in _MISSING]:
            raise ValueError(f"step {missing[0]} has no value; fill it before")
        if wrong := [step for step, text in enumerate(texts) if not is_number(text)]:
            text = show_name(texts[wrong[0]])
            raise ValueError(f"step {wrong[0]} is {text!r:.60}; must be a number")
        columns.append(np.array(texts, np.str_).astype(np.float64))
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ValueError(f"has channels of {min(lengths)} to {max(lengths)} steps; must be equal")
    return np.stack(columns, axis=1)
