"""Paths of leaves as text."""

from __future__ import annotations

from pipeline.core.host.tree_paths import flatten_by_path, list_leaf_paths


def test_leaves_are_named_by_their_path() -> None:
    tree = {"dense": {"kernel": 1, "bias": 2}, "steps": [3, (4,)]}
    leaves = {"dense/bias": 2, "dense/kernel": 1, "steps/0": 3, "steps/1/0": 4}
    assert flatten_by_path(tree) == leaves
    assert list_leaf_paths(tree) == list(leaves)
    assert list_leaf_paths(5) == [""]
