"""Texts for the paths of leaves in a tree of arrays."""

from __future__ import annotations

from typing import Any


def format_path(path: Any) -> str:
    """Return jax's path of a leaf as text, such as "conv_0/kernel"."""
    # Imported here, since descriptions of optimizers import this module without jax.
    import jax

    return jax.tree_util.keystr(path, simple=True, separator="/")


def list_leaf_paths(tree: Any) -> list[str]:
    """Return the path of each leaf of a tree."""
    import jax

    return [format_path(path) for path, _ in jax.tree.leaves_with_path(tree)]


def flatten_by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path."""
    import jax

    return dict(zip(list_leaf_paths(tree), jax.tree.leaves(tree), strict=True))
