"""Differences of two trees of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.core.files.error_text import dotted
from pipeline.core.files.value_text import show

Where = tuple[int | str, ...]


@dataclass(frozen=True)
class Difference:
    """A leaf in which two trees differ; None for the tree that lacks it."""

    where: Where
    one: Any
    other: Any

    @property
    def key(self) -> str:
        """The dotted path, such as `train.optimizer.lr`."""
        return dotted(self.where)

    def __str__(self) -> str:
        return f"{self.key} = {show(self.one)}: was {show(self.other)}"


def leaves(tree: Any, where: Where = ()) -> Iterator[tuple[Where, Any]]:
    """The leaves of nested mappings and lists with their paths; empty ones have none."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*where, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, (*where, index))
    else:
        yield where, tree


def differences(one: Any, other: Any) -> list[Difference]:
    """The leaves that differ, in the order of the first tree, then of the second."""
    first, second = dict(leaves(one)), dict(leaves(other))
    return [
        Difference(where, first.get(where), second.get(where))
        for where in dict.fromkeys((*first, *second))
        if first.get(where) != second.get(where)
    ]
