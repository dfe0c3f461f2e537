"""References from one key of a recipe to another, `${train.batch_size}`, within bounds.

They are the only OmegaConf interpolations that a recipe file may have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipeline.core.files.safe_yaml import MAX_DEPTH
from pipeline.core.files.tree_diff import Where, dotted_key, leaves, value_at
from pipeline.core.files.value_text import show

MAX_SIZE = 100_000
"""Values of a recipe with its references resolved; a long text counts as several."""
MAX_CHAIN = 24
"""Length of a chain of references; OmegaConf resolves them recursively, and Python's stack allows
about 50."""
CHARACTERS_A_VALUE = 64

_OPENING = "${"
_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+|\[\w+\])*)\}")


def refused_references(tree: Any) -> Iterator[str]:
    """Yield a problem for every value that is more than a reference to another key.

    Resolvers run code: `oc.env` reads the environment, `oc.create` and `oc.decode` build values
    from texts. They are allowed on the command line, not in a file.
    """
    for where, text in texts_in(tree):
        if text.count(_OPENING) != len(_REFERENCE.findall(text)):
            yield (
                f"{dotted_key(where)} = {show(text)}: a recipe file may refer to other keys, as in "
                "${train.batch_size}, and to nothing else; resolvers such as oc.env are for the "
                "command line"
            )


def require_bounded(tree: dict[str, Any]) -> None:
    """Raise ValueError if references would make a recipe too large, or are circular.

    `tree` is the composed recipe, unresolved. References to missing keys are ignored here.
    """
    if any(_OPENING in text for _, text in texts_in(tree)):
        _Measurements(tree).measure((), (), 0)


class _Resolved(NamedTuple):
    """The size of a subtree with its references resolved."""

    size: int
    """Number of values."""
    levels: int
    """Depth of nesting."""
    chain: int
    """Length of the longest chain of references in it."""


def _require_bounds(where: Where, resolved: _Resolved) -> None:
    """Raise ValueError if the subtree at `where` is beyond one of the bounds."""
    if resolved.size > MAX_SIZE:
        reason = f"references make more than {MAX_SIZE:,} values of it"
    elif resolved.levels > MAX_DEPTH:
        reason = f"references nest it more than {MAX_DEPTH} levels deep"
    elif resolved.chain > MAX_CHAIN:
        reason = (
            f"more than {MAX_CHAIN} references lead from one to the next; refer to the key "
            "that has the value"
        )
    else:
        return
    raise ValueError(f"{dotted_key(where)}: {reason}")


class _Measurements:
    """The sizes of all subtrees of a tree with references resolved, each measured once."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tree = tree
        self._measured: dict[Where, _Resolved] = {}

    def measure(self, where: Where, through: tuple[Where, ...], level: int) -> _Resolved:
        """Return the size of the subtree at `where`, reached by the references `through`, `level`
        deep.

        Bounds are checked on the way down too, so a subtree beyond them is not walked entirely.
        Raises ValueError.
        """
        total = self._measured.get(where, _Resolved(1, 0, 0))
        _require_bounds(
            where, _Resolved(total.size, level + total.levels, len(through) + total.chain)
        )
        if where not in self._measured:
            total = self._add_up(where, through, level)
            _require_bounds(where, total)
            self._measured[where] = total
        return total

    def _add_up(self, where: Where, through: tuple[Where, ...], level: int) -> _Resolved:
        node, passed = self._at(where, ())
        if isinstance(node, dict | list):
            keys = node if isinstance(node, dict) else range(len(node))
            alone = _Resolved(1, 1, passed)
            children = [self.measure((*where, key), through, level + 1) for key in keys]
        elif isinstance(node, str):
            targets = _targets(node)
            if targets and where in through:
                raise ValueError(_circle(where, node))
            alone = _Resolved(1 + len(node) // CHARACTERS_A_VALUE, 0, passed + bool(targets))
            children = [self.measure(target, (*through, where), level) for target in targets]
        else:
            return _Resolved(1, 0, passed)
        return _Resolved(
            alone.size + sum(child.size for child in children),
            alone.levels + max((child.levels for child in children), default=0),
            alone.chain + max((child.chain for child in children), default=0),
        )

    def _at(self, where: Where, through: tuple[Where, ...]) -> tuple[Any, int]:
        """Return the node at `where`, None if missing, and how many references are on the path."""
        node: Any = self._tree
        for depth, key in enumerate(where):
            if isinstance(node, str) and _REFERENCE.fullmatch(node):
                passed = where[:depth]
                if passed in through:
                    raise ValueError(_circle(passed, node))
                _require_bounds(passed, _Resolved(1, 0, len(through)))
                return self._at((*_targets(node)[0], *where[depth:]), (*through, passed))
            is_index = isinstance(node, list) and str(key).isdecimal()
            node = value_at(node, (int(key) if is_index else key,))
        return node, len(through)


def _targets(text: str) -> list[Where]:
    """Return the paths that the references in a text point to."""
    return [tuple(re.findall(r"\w+", path)) for path in _REFERENCE.findall(text)]


def _circle(where: Where, text: str) -> str:
    return f"{dotted_key(where)} = {show(text)}: references go in a circle"


def texts_in(tree: Any) -> Iterator[tuple[Where, str]]:
    """Yield the texts of a tree with their paths."""
    return ((where, leaf) for where, leaf in leaves(tree) if isinstance(leaf, str))
