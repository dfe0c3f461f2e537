"""Changes to bytes, and to trees of keys and values, drawn from a random generator."""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

INTERESTING = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63,
    2**64 - 1,
)
WIDTHS = ("<B", "<H", ">H", "<I", ">I", "<Q", ">Q")

VALUES: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 16, 255, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30),
    *(0.0, -0.0, 0.5, 1.0, -1.5, 1e-308, 5e-324, 1e308, float("inf"), float("nan"), 3.0),
    *("", " ", "\0", "x", "[", "a: b: c", "!!python/object:x", "${seed}", "${oc.env:HOME}", "???"),
    *(
        "../../x",
        "/",
        "~",
        "\u202e",
        "\x1b[31m",
        "[/red]",
        "auto",
        "null",
        "1e5",
        "relu",
        "x" * 999,
    ),
    *([], {}, [[]], [None], [1, 2], [0, 0], [-1, 2**40], ["x"], {"name": None}, {"name": "relu"}),
    *({"x": 1}, {"name": "x"}, [[[[[[]]]]]], "a\nb", "é", "*", "**/[", "(a+)+$", "\\1"),
)
"""What is put in the place of other values."""


def mutate_bytes(rng: Random, content: bytes) -> bytes:
    """The content with one to eight changes, the last of which may truncate it."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        rng.choice(_CHANGES)(rng, changed)
    return bytes(changed)


def _flip(rng: Random, content: bytearray) -> None:
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _overwrite(rng: Random, content: bytearray) -> None:
    width = rng.choice(WIDTHS)
    size = struct.calcsize(width)
    if len(content) >= size:
        # Headers are where numbers decide something.
        at = rng.randrange(min(len(content) - size + 1, rng.choice((16, 256, 1 << 30))))
        value = rng.choice(INTERESTING) % (1 << (8 * size))
        struct.pack_into(width, content, at, value)


def _truncate(rng: Random, content: bytearray) -> None:
    del content[rng.randrange(len(content) + 1) :]


def _drop(rng: Random, content: bytearray) -> None:
    start = rng.randrange(len(content) + 1)
    del content[start : start + rng.choice((1, 2, 8, 64, 4096))]


def _insert(rng: Random, content: bytearray) -> None:
    at = rng.randrange(len(content) + 1)
    content[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))


def _repeat(rng: Random, content: bytearray) -> None:
    start = rng.randrange(len(content) + 1)
    part = content[start : start + rng.choice((1, 8, 64, 512))]
    content[start:start] = part * rng.choice((1, 2, 100))


def _zero(rng: Random, content: bytearray) -> None:
    start = rng.randrange(len(content) + 1)
    length = min(rng.choice((1, 8, 64, 4096)), len(content) - start)
    content[start : start + length] = bytes(length)


_CHANGES = (_flip, _overwrite, _truncate, _drop, _insert, _repeat, _zero)

Place = tuple[str | int, ...]


def mutate_tree(rng: Random, tree: Any, values: Sequence[Any] = VALUES) -> Any:
    """A copy of a tree of dicts, lists and plain values with one to three changes."""
    changed = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(walk(changed))
        if places:
            _change(rng, changed, rng.choice(places), values)
    return changed


def nudge_tree(rng: Random, tree: Any) -> Any:
    """A copy of a tree with one or two of its numbers, switches and words replaced by others like
    them, so that most of what comes of it can be carried out."""
    changed = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2))):
        *path, key = rng.choice(list(walk(changed)))
        parent = changed
        for step in path:
            parent = parent[step]
        if isinstance(parent[key], bool | int | float | list):
            parent[key] = _nearby(rng, parent[key])
        elif parent[key] is None:
            parent[key] = rng.choice((1, 2, 5, 0.5, "loss", [[8, 8]]))
    return changed


def walk(tree: Any, where: Place = ()) -> Iterator[Place]:
    """Every place in a tree but its root."""
    items: Any = ()
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    for key, value in items:
        yield (*where, key)
        yield from walk(value, (*where, key))


def _change(rng: Random, tree: Any, where: Place, values: Sequence[Any]) -> None:
    parent = tree
    for key in where[:-1]:
        parent = parent[key]
    key = where[-1]
    match rng.randrange(9):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[_misspelt(rng, str(key))] = parent.pop(key)
        case 2 if isinstance(parent, dict):
            parent[rng.choice(("x", "name", "_target_", "hydra", "", "a.b", str(key) * 2))] = (
                copy.deepcopy(rng.choice(values))
            )
        case 3 if isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
        case 4:
            parent[key] = _nearby(rng, parent[key])
        case 5:
            other = tree
            for step in rng.choice(list(walk(tree))):
                other = other[step]
            parent[key] = copy.deepcopy(other)
        case _:
            parent[key] = copy.deepcopy(rng.choice(values))


def _misspelt(rng: Random, key: str) -> str:
    at = rng.randrange(len(key) + 1)
    return key[:at] + rng.choice(("", "x", "_", key[at : at + 1])) + key[at + 1 :]


def _nearby(rng: Random, value: Any) -> Any:
    """A value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 1000, value // 2, 2 * value))
    if isinstance(value, float):
        truncated = int(value) if math.isfinite(value) else 0
        return rng.choice((-value, value * 1e30, value / 1e30, 1 - value, truncated))
    if isinstance(value, str):
        return rng.choice((_misspelt(rng, value), value.upper(), value * 2, value[:1]))
    if isinstance(value, list):
        return rng.choice((value[::-1], value[:1], value * 2, [value]))
    return [value]
