"""Keys that recipes of older versions have, and that have another name or meaning now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.core.files.error_text import Location


class MovedKey(NamedTuple):
    """A key that is gone: the value that asked for nothing, and what to write instead."""

    harmless: Any
    problem: str


MOVED: Mapping[tuple[str, str], MovedKey] = {
    ("device", "devices"): MovedKey(
        1,
        "is parallel.devices now, with parallel.mode=data; train.batch_size is the batch of all "
        "devices",
    ),
}


def moved_problems() -> Mapping[Location, str]:
    """Return the problem of each moved key, by its place in a recipe."""
    return {where: moved.problem for where, moved in MOVED.items()}


def without_moved(tree: Mapping[str, Any], *, harmless: bool = True) -> dict[str, Any]:
    """Return the recipe of an older run without moved keys; only `harmless` ones by default."""
    copy = dict(tree)
    for (section, key), moved in MOVED.items():
        inside = copy.get(section)
        if not isinstance(inside, Mapping) or key not in inside:
            continue
        if not harmless or inside[key] == moved.harmless:
            copy[section] = {name: value for name, value in inside.items() if name != key}
    return copy
