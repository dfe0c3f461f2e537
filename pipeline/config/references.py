"""Checks of references from one key of a recipe to another, such as `${train.batch_size}`.

References must be bounded in number and depth. A recipe file may have no other interpolations of
OmegaConf.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipeline.core.files.safe_yaml import MAX_DEPTH
from pipeline.core.files.tree_diff import TreePath, find_value, format_key, iterate_leaves
from pipeline.core.files.value_text import show

MAX_SIZE = 100_000
"""A recipe has at most this many values after its references are resolved."""
MAX_CHAIN = 24
"""Longest chain of references. OmegaConf resolves chains recursively, and Python's stack allows
about 50."""
CHARACTERS_A_VALUE = 64
"""A text has the size of one value, and of one more for each of these many characters."""

_OPENING = "${"
_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+|\[\w+\])*)\}")


def find_refused_references(tree: Any) -> Iterator[str]:
    """Yield a problem for every interpolation that isn't a reference to another key.

    Resolvers run code: `oc.env` reads the environment, `oc.create` and `oc.decode` build values
    from texts. They are allowed on the command line alone.
    """
    for path, text in iterate_texts(tree):
        if text.count(_OPENING) != len(_REFERENCE.findall(text)):
            yield (
                f"{format_key(path)} = {show(text)}: a recipe file may refer to other keys, as in "
                "${train.batch_size}, and to nothing else; resolvers such as oc.env are for the "
                "command line"
            )


def require_bounded(tree: dict[str, Any]) -> None:
    """Raise ValueError if references are circular or make a recipe too large.

    `tree` is the composed recipe, unresolved. References to missing keys are ignored.
    """
    if any(_OPENING in text for _, text in iterate_texts(tree)):
        _Measurements(tree).measure((), (), 0)


class _Measures(NamedTuple):
    """The measures of a subtree whose references are resolved."""

    size: int
    """Number of values."""
    levels: int
    """Depth of nesting."""
    chain: int
    """Length of the longest chain of references in the subtree."""


def _require_bounds(path: TreePath, measures: _Measures) -> None:
    """Raise ValueError if the subtree at `path` exceeds a bound."""
    if measures.size > MAX_SIZE:
        reason = f"references make more than {MAX_SIZE:,} values of it"
    elif measures.levels > MAX_DEPTH:
        reason = f"references nest it more than {MAX_DEPTH} levels deep"
    elif measures.chain > MAX_CHAIN:
        reason = (
            f"a chain of references must have at most {MAX_CHAIN}; refer to the key that has the "
            "value"
        )
    else:
        return
    raise ValueError(f"{format_key(path)}: {reason}")


class _Measurements:
    """The measures of a tree's subtrees. Each subtree is measured once."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tree = tree
        self._measured: dict[TreePath, _Measures] = {}

    def measure(self, path: TreePath, references: tuple[TreePath, ...], level: int) -> _Measures:
        """Return the measures of the subtree at `path`.

        `references` has the paths of the references that lead there, `level` is the depth. Raises
        ValueError as soon as a bound is exceeded, before the whole subtree is walked.
        """
        total = self._measured.get(path, _Measures(1, 0, 0))
        levels = level + total.levels
        chain = len(references) + total.chain
        _require_bounds(path, _Measures(total.size, levels, chain))
        if path not in self._measured:
            total = self._add_up(path, references, level)
            _require_bounds(path, total)
            self._measured[path] = total
        return total

    def _add_up(self, path: TreePath, references: tuple[TreePath, ...], level: int) -> _Measures:
        """Measure the node at `path` with its children, or with the targets of its references."""
        node, num_references = self._find_node(path, ())
        if isinstance(node, dict | list):
            keys = node if isinstance(node, dict) else range(len(node))
            alone = _Measures(1, 1, num_references)
            children = [self.measure((*path, key), references, level + 1) for key in keys]
        elif isinstance(node, str):
            targets = _parse_targets(node)
            if targets and path in references:
                raise ValueError(_describe_circle(path, node))
            size = 1 + len(node) // CHARACTERS_A_VALUE
            alone = _Measures(size, 0, num_references + bool(targets))
            children = [self.measure(target, (*references, path), level) for target in targets]
        else:
            return _Measures(1, 0, num_references)
        return _Measures(
            alone.size + sum(child.size for child in children),
            alone.levels + max((child.levels for child in children), default=0),
            alone.chain + max((child.chain for child in children), default=0),
        )

    def _find_node(self, path: TreePath, references: tuple[TreePath, ...]) -> tuple[Any, int]:
        """Return the node at `path` and the number of references that lead there.

        The node is None if it is missing. `references` has the paths of references before `path`.
        """
        node: Any = self._tree
        for depth, key in enumerate(path):
            if isinstance(node, str) and _REFERENCE.fullmatch(node):
                reference = path[:depth]
                if reference in references:
                    raise ValueError(_describe_circle(reference, node))
                _require_bounds(reference, _Measures(1, 0, len(references)))
                target = (*_parse_targets(node)[0], *path[depth:])
                return self._find_node(target, (*references, reference))
            is_index = isinstance(node, list) and str(key).isdecimal()
            node = find_value(node, (int(key) if is_index else key,))
        return node, len(references)


def _parse_targets(text: str) -> list[TreePath]:
    """Return the paths that the references in a text point to."""
    return [tuple(re.findall(r"\w+", path)) for path in _REFERENCE.findall(text)]


def _describe_circle(path: TreePath, text: str) -> str:
    return f"{format_key(path)} = {show(text)}: references must not be circular"


def iterate_texts(tree: Any) -> Iterator[tuple[TreePath, str]]:
    """Yield the texts of a tree with their paths."""
    return ((path, leaf) for path, leaf in iterate_leaves(tree) if isinstance(leaf, str))
