"""Series of names in braces, as bash expands them: shard-{000..009}.tar, {train,val}.tar."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

MAX_NAMES = 100_000
MAX_BRACES = 8
"""Limits of the names and braces of a pattern, so that no pattern can fill the memory."""

_BRACES = re.compile(r"\{(?:(\d{1,9})\.\.(\d{1,9})|([^{}]*,[^{}]*))\}")


def expand_braces(pattern: str) -> list[str]:
    """Return the names of a pattern, each once; other braces stay as they are.

    {8..11} are numbers, {08..11} numbers of two digits, and {a,b} texts; braces may be nested.
    Raises ValueError for too many names or braces.
    """
    has_few_braces = pattern.count("{") <= MAX_BRACES
    names = list(islice(_iterate_names(pattern), MAX_NAMES + 1)) if has_few_braces else []
    if not names or len(names) > MAX_NAMES:
        limit = f"at most {MAX_NAMES:,} names, by {MAX_BRACES} braces"
        raise ValueError(f"{pattern}: must stand for {limit}")
    return list(dict.fromkeys(names))


def _iterate_names(pattern: str) -> Iterator[str]:
    """Yield the names of a pattern: expand its first braces, then those in each result."""
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    first, last, texts = braces.groups()
    choices: Iterable[str]
    if texts is not None:
        choices = texts.split(",")
    else:
        is_padded = any(text.startswith("0") and text != "0" for text in (first, last))
        width = max(len(first), len(last)) if is_padded else 0
        step = 1 if int(first) <= int(last) else -1
        choices = (f"{n:0{width}}" for n in range(int(first), int(last) + step, step))
    for choice in choices:
        yield from _iterate_names(pattern[: braces.start()] + choice + pattern[braces.end() :])
