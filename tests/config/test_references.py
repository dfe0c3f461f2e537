"""References between keys: nothing else in a file, no circles, and bounded sizes."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.references import (
    MAX_CHAIN,
    find_refused_references,
    iterate_texts,
    require_bounded,
)


def test_texts_are_listed_with_their_paths() -> None:
    tree = {"a": "x", "b": [1, {"c": "y"}], "d": None}
    assert dict(iterate_texts(tree)) == {("a",): "x", ("b", 1, "c"): "y"}


@pytest.mark.parametrize(
    "text", ["${oc.env:HOME}", "${a}${oc.create:{}}", "${${a}}", "${a", "${.a}"]
)
def test_resolver_is_refused(text: str) -> None:
    (problem,) = find_refused_references({"train": {"steps": text}})
    assert problem.startswith("train.steps = ")
    assert "resolvers such as oc.env are for the command line" in problem


@pytest.mark.parametrize("text", ["${train.batch_size}", "a${b}-${c[0].d}", "no reference", "$a"])
def test_reference_to_a_key_is_allowed(text: str) -> None:
    assert list(find_refused_references({"a": [text]})) == []


@pytest.mark.parametrize(
    "tree",
    [
        {"a": "${b}", "b": "${a}"},
        {"a": "${a}"},
        {"a": {"b": "${a}"}},
        {"a": "${b.c}", "b": "${a}"},
    ],
)
def test_circular_or_deep_reference_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must not be circular|levels deep|chain of references"):
        require_bounded(tree)


def test_exponential_references_are_refused() -> None:
    tree: dict[str, Any] = {"a0": ["x"] * 10}
    for level in range(1, 8):
        tree[f"a{level}"] = [f"${{a{level - 1}}}"] * 10
    with pytest.raises(ValueError, match="references make more than 100,000 values of it"):
        require_bounded(tree)


@pytest.mark.parametrize("length", [MAX_CHAIN - 1, MAX_CHAIN + 1])
def test_reference_chain_length_is_bounded(length: int) -> None:
    tree: dict[str, Any] = {f"a{number}": f"${{a{number + 1}}}" for number in range(length)}
    tree[f"a{length}"] = 1
    if length < MAX_CHAIN:
        require_bounded(tree)
        return
    with pytest.raises(ValueError, match="a chain of references must have at most 24"):
        require_bounded(tree)


def test_reference_to_missing_key_is_not_checked() -> None:
    """The composition reports a missing key; a check of it here would raise ValueError."""
    require_bounded({"a": "${b.c}", "b": 1})
