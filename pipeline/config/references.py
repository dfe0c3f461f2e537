"""References from one key of a recipe to another, `${train.batch_size}`: all that OmegaConf's
interpolations may be in a recipe file, and no more than a recipe's worth of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pipeline.problems import dotted, show

Where = tuple[str | int, ...]

MAX_SIZE = 100_000
"""Values of a recipe once its references are resolved; a long text counts as several."""
MAX_CHAIN = 16
"""References that lead to references."""
CHARACTERS_A_VALUE = 64

_OPENING = "${"
_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+|\[\w+\])*)\}")


def refused_references(tree: Any) -> Iterator[str]:
    """A problem for every value that asks for more than another key.

    Resolvers compute: `oc.env` reads the environment, `oc.create` and `oc.decode` make values of
    texts. What the user types may do so, a file may not.
    """
    for where, text in _texts(tree):
        if text.count(_OPENING) != len(_REFERENCE.findall(text)):
            yield (
                f"{dotted(where)} = {show(text)}: a recipe file may refer to other keys, as in "
                "${train.batch_size}, and to nothing else; resolvers such as oc.env are for the "
                "command line"
            )


def require_bounded(tree: dict[str, Any]) -> None:
    """Raise ValueError where references would make a recipe too large, or go in a circle.

    `tree` is the composed recipe, unresolved. A reference that leads nowhere is no matter of this.
    """
    if any(_OPENING in text for _, text in _texts(tree)):
        _Sizes(tree).of((), ())


class _Sizes:
    """How many values every part of a tree has once it is resolved."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tree = tree
        self._known: dict[Where, int] = {}

    def of(self, where: Where, through: tuple[Where, ...]) -> int:
        """The size of what stands at `where`, reached through the references at `through`."""
        if where not in self._known:
            self._known[where] = size = self._measure(where, through)
            if size > MAX_SIZE:
                raise ValueError(
                    f"{dotted(where)}: references make more than {MAX_SIZE:,} values of it"
                )
        return self._known[where]

    def _measure(self, where: Where, through: tuple[Where, ...]) -> int:
        node = self._at(where)
        if isinstance(node, dict):
            return 1 + sum(self.of((*where, key), through) for key in node)
        if isinstance(node, list):
            return 1 + sum(self.of((*where, index), through) for index in range(len(node)))
        if not isinstance(node, str):
            return 1
        targets = _targets(node)
        if targets and (where in through or len(through) > MAX_CHAIN):
            raise ValueError(_circle(where, node))
        sizes = (self.of(target, (*through, where)) for target in targets)
        return 1 + len(node) // CHARACTERS_A_VALUE + sum(sizes)

    def _at(self, where: Where, chain: int = 0) -> Any:
        """What stands at `where`, on the way to which other references may lie; None if nothing."""
        node: Any = self._tree
        for depth, key in enumerate(where):
            if isinstance(node, str) and _REFERENCE.fullmatch(node):
                if chain > MAX_CHAIN:
                    raise ValueError(_circle(where[:depth], node))
                return self._at((*_targets(node)[0], *where[depth:]), chain + 1)
            node = _child(node, key)
        return node


def _targets(text: str) -> list[Where]:
    """What the references in a text lead to."""
    return [tuple(re.findall(r"\w+", path)) for path in _REFERENCE.findall(text)]


def _child(node: Any, key: str | int) -> Any:
    if isinstance(node, dict):
        return node.get(key)
    if isinstance(node, list) and str(key).isdecimal() and int(key) < len(node):
        return node[int(key)]
    return None


def _circle(where: Where, text: str) -> str:
    return f"{dotted(where)} = {show(text)}: references go in a circle"


def _texts(tree: Any, where: Where = ()) -> Iterator[tuple[Where, str]]:
    if isinstance(tree, str):
        yield where, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _texts(value, (*where, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _texts(value, (*where, index))
