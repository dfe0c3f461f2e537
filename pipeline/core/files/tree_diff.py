"""Trees of keys and values: their leaves, the value at a path, and differences of two trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.core.files.value_text import show

Where = tuple[int | str, ...]
"""A path in a tree."""


@dataclass(frozen=True)
class Difference:
    """A leaf in which two trees differ: its path, and its value in each tree; None if missing."""

    where: Where
    one: Any
    other: Any

    @property
    def key(self) -> str:
        """Dotted path, such as `train.optimizer.lr`."""
        return dotted_key(self.where)

    def __str__(self) -> str:
        return f"{self.key} = {show(self.one)}: was {show(self.other)}"


def dotted_key(where: Sequence[int | str]) -> str:
    """Return a path as Hydra writes it: ("dataset", "ops", 0, "size") as `dataset.ops.0.size`."""
    return ".".join(map(str, where))


def leaves(tree: Any, where: Where = ()) -> Iterator[tuple[Where, Any]]:
    """Yield the paths and values of the leaves of nested mappings and lists."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*where, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, (*where, index))
    else:
        yield where, tree


def value_at(tree: Any, where: Sequence[int | str], default: Any = None) -> Any:
    """Return the value at a path of nested mappings and lists; `default` if the path is missing."""
    for key in where:
        has_key = isinstance(tree, Mapping) and key in tree
        has_index = isinstance(tree, list) and isinstance(key, int) and key < len(tree)
        if not has_key and not has_index:
            return default
        tree = tree[key]
    return tree


def differences(tree: Any, other: Any) -> list[Difference]:
    """Return the leaves that differ, in the order of `tree`, then those that only `other` has."""
    values = dict(leaves(tree))
    other_values = dict(leaves(other))
    return [
        Difference(where, values.get(where), other_values.get(where))
        for where in dict.fromkeys((*values, *other_values))
        if values.get(where) != other_values.get(where)
    ]
