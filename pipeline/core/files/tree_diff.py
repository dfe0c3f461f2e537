"""Trees of mappings and lists: their leaves, the value at a path, and differences of two trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.core.files.value_text import show

TreePath = tuple[int | str, ...]
"""The keys and indices from the root of a tree to a value."""


@dataclass(frozen=True)
class Difference:
    """A leaf that differs between two trees. Its value is None in a tree that lacks it."""

    path: TreePath
    value: Any
    other_value: Any

    @property
    def key(self) -> str:
        """Dotted path, such as `train.optimizer.lr`."""
        return format_key(self.path)

    def __str__(self) -> str:
        """Return `key = value: was other_value`, as if the other tree were an earlier one."""
        return f"{self.key} = {show(self.value)}: was {show(self.other_value)}"


def format_key(path: Sequence[int | str]) -> str:
    """Return a path as Hydra writes it: ("dataset", "ops", 0, "size") as `dataset.ops.0.size`."""
    return ".".join(map(str, path))


def iterate_leaves(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Yield the paths and values of the leaves of nested mappings and lists."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from iterate_leaves(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from iterate_leaves(value, (*path, index))
    else:
        yield path, tree


def find_value(tree: Any, path: Sequence[int | str], default: Any = None) -> Any:
    """Return the value at a path of nested mappings and lists; `default` if the path is missing."""
    for key in path:
        has_key = isinstance(tree, Mapping) and key in tree
        has_index = isinstance(tree, list) and isinstance(key, int) and key < len(tree)
        if not has_key and not has_index:
            return default
        tree = tree[key]
    return tree


def list_differences(tree: Any, other: Any) -> list[Difference]:
    """Return the leaves that differ, in the order of `tree`, then those that only `other` has."""
    values = dict(iterate_leaves(tree))
    other_values = dict(iterate_leaves(other))
    return [
        Difference(path, values.get(path), other_values.get(path))
        for path in dict.fromkeys((*values, *other_values))
        if values.get(path) != other_values.get(path)
    ]
