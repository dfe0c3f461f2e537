"""References from one key of a recipe to another, `${train.batch_size}`: all that OmegaConf's
interpolations may be in a recipe file, and no more than a recipe's worth of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pipeline.files.error_text import dotted, show
from pipeline.files.safe_yaml import MAX_DEPTH

Where = tuple[str | int, ...]

MAX_SIZE = 100_000
"""Values of a recipe once its references are resolved; a long text counts as several."""
MAX_CHAIN = 24
"""References that lead to references; OmegaConf resolves each within the one before, and Python's
stack takes some 50."""
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
        _Measured(tree).of((), (), 0)


class _Resolved(NamedTuple):
    """How large a part of a tree is once it is resolved."""

    size: int
    """Values."""
    levels: int
    """How deep it is nested."""
    chain: int
    """References that lead to references on the longest way into it."""


class _Measured:
    """How large every part of a tree is once it is resolved."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tree = tree
        self._known: dict[Where, _Resolved] = {}

    def of(self, where: Where, through: tuple[Where, ...], level: int) -> _Resolved:
        """What stands at `where`, reached through the references at `through` and so many levels.

        Bounds are held on the way down too: what is beyond them is not walked to its end.
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
        """What stands at `where`, None if nothing, and how many references lie on the way there."""
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
    """Parts together in what adds so much to each measure."""
    return _Resolved(
        size + sum(part.size for part in parts),
        level + max((part.levels for part in parts), default=0),
        chain + max((part.chain for part in parts), default=0),
    )


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
