"""References from one key of a recipe to another, `${train.batch_size}`, within bounds.

They are the only OmegaConf interpolations that a recipe file may have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pipeline.core.files.error_text import dotted, show
from pipeline.core.files.safe_yaml import MAX_DEPTH

Where = tuple[str | int, ...]

MAX_SIZE = 100_000
"""Values of a recipe with its references resolved; a long text counts as several."""
MAX_CHAIN = 24
"""Length of a chain of references; OmegaConf resolves them recursively, and Python's stack allows
about 50."""
CHARACTERS_A_VALUE = 64

_OPENING = "${"
_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+|\[\w+\])*)\}")


def refused_references(tree: Any) -> Iterator[str]:
    """A problem for every value that is more than a reference to another key.

    Resolvers run code: `oc.env` reads the environment, `oc.create` and `oc.decode` build values
    from texts. They are allowed on the command line, not in a file.
    """
    for where, text in texts_of(tree):
        if text.count(_OPENING) != len(_REFERENCE.findall(text)):
            yield (
                f"{dotted(where)} = {show(text)}: a recipe file may refer to other keys, as in "
                "${train.batch_size}, and to nothing else; resolvers such as oc.env are for the "
                "command line"
            )


def require_bounded(tree: dict[str, Any]) -> None:
    """Raise ValueError where references would make a recipe too large, or are circular.

    `tree` is the composed recipe, unresolved. References to missing keys are ignored here.
    """
    if any(_OPENING in text for _, text in texts_of(tree)):
        _Measurements(tree).of((), (), 0)


class _Resolved(NamedTuple):
    """The size of a subtree with its references resolved."""

    size: int
    """Number of values."""
    levels: int
    """Depth of nesting."""
    chain: int
    """Length of the longest chain of references in it."""


class _Measurements:
    """The sizes of all subtrees of a tree with references resolved, each measured once."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tree = tree
        self._known: dict[Where, _Resolved] = {}

    def of(self, where: Where, through: tuple[Where, ...], level: int) -> _Resolved:
        """The size of the subtree at `where`, reached by the references `through`, `level` deep.

        Bounds are checked on the way down too, so a subtree beyond them is not walked entirely.
        Raises ValueError.
        """
        found = self._known.get(where, _Resolved(1, 0, 0))
        self._require(where, found.size, level + found.levels, len(through) + found.chain)
        if where not in self._known:
            found = self._measure(where, through, level)
            self._require(where, *found)
            self._known[where] = found
        return found

    def _require(self, where: Where, size: int, levels: int, chain: int) -> None:
        if size > MAX_SIZE:
            reason = f"references make more than {MAX_SIZE:,} values of it"
        elif levels > MAX_DEPTH:
            reason = f"references nest it more than {MAX_DEPTH} levels deep"
        elif chain > MAX_CHAIN:
            reason = (
                f"more than {MAX_CHAIN} references lead from one to the next; refer to the key "
                "that has the value"
            )
        else:
            return
        raise ValueError(f"{dotted(where)}: {reason}")

    def _measure(self, where: Where, through: tuple[Where, ...], level: int) -> _Resolved:
        node, passed = self._at(where, ())
        if isinstance(node, dict | list):
            keys = node if isinstance(node, dict) else range(len(node))
            within = [self.of((*where, key), through, level + 1) for key in keys]
            return _joined(1, within, level=1, chain=passed)
        if not isinstance(node, str):
            return _Resolved(1, 0, passed)
        targets = _targets(node)
        if targets and where in through:
            raise ValueError(_circle(where, node))
        resolved = [self.of(target, (*through, where), level) for target in targets]
        own = 1 + len(node) // CHARACTERS_A_VALUE
        return _joined(own, resolved, level=0, chain=passed + bool(targets))

    def _at(self, where: Where, through: tuple[Where, ...]) -> tuple[Any, int]:
        """The node at `where`, None if missing, and the number of references on the path to it."""
        node: Any = self._tree
        for depth, key in enumerate(where):
            if isinstance(node, str) and _REFERENCE.fullmatch(node):
                passed = where[:depth]
                if passed in through:
                    raise ValueError(_circle(passed, node))
                self._require(passed, 1, 0, len(through))
                return self._at((*_targets(node)[0], *where[depth:]), (*through, passed))
            node = _child(node, key)
        return node, len(through)


def _joined(size: int, parts: Sequence[_Resolved], *, level: int, chain: int) -> _Resolved:
    """The size of a node with these parts; the other arguments are the node's own share."""
    return _Resolved(
        size + sum(part.size for part in parts),
        level + max((part.levels for part in parts), default=0),
        chain + max((part.chain for part in parts), default=0),
    )


def _targets(text: str) -> list[Where]:
    """The paths that the references in a text point to."""
    return [tuple(re.findall(r"\w+", path)) for path in _REFERENCE.findall(text)]


def _child(node: Any, key: str | int) -> Any:
    if isinstance(node, dict):
        return node.get(key)
    if isinstance(node, list) and str(key).isdecimal() and int(key) < len(node):
        return node[int(key)]
    return None


def _circle(where: Where, text: str) -> str:
    return f"{dotted(where)} = {show(text)}: references go in a circle"


def texts_of(tree: Any, where: Where = ()) -> Iterator[tuple[Where, str]]:
    if isinstance(tree, str):
        yield where, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from texts_of(value, (*where, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from texts_of(value, (*where, index))
