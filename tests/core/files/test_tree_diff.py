from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.files.tree_diff import Difference, iterate_leaves, list_differences

TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)


def test_leaves_are_named_by_their_path() -> None:
    tree = {"a": {"b": [1, {"c": None}]}, "d": "text", "e": {}}
    assert dict(iterate_leaves(tree)) == {
        ("a", "b", 0): 1,
        ("a", "b", 1, "c"): None,
        ("d",): "text",
    }


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, [Difference(("b",), 2, 3)]),
        ({"a": [1]}, {"a": [1, 2]}, [Difference(("a", 1), None, 2)]),
        ({"a": {"x": 1}}, {}, [Difference(("a", "x"), 1, None)]),
        ({"a": None}, {}, []),
    ],
    ids=["value", "longer", "missing", "null is nothing"],
)
def test_differences_are_listed(one: object, other: object, found: list[Difference]) -> None:
    assert list_differences(one, other) == found


def test_difference_key_has_dotted_form() -> None:
    assert Difference(("train", "ops", 0), 1, 2).key == "train.ops.0"


@pytest.mark.slow
@given(TREES)
def test_tree_has_no_differences_from_itself(tree: object) -> None:
    assert list_differences(tree, tree) == []


@pytest.mark.medium
@given(TREES, TREES)
def test_swapped_trees_have_the_same_differences(one: object, other: object) -> None:
    swapped = {(d.path, repr(d.other_value), repr(d.value)) for d in list_differences(other, one)}
    assert {
        (d.path, repr(d.value), repr(d.other_value)) for d in list_differences(one, other)
    } == swapped
