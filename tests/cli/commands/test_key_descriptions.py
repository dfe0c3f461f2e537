"""Descriptions of keys: types and defaults in words, and docstrings below fields."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.cli.commands.help import render_key
from pipeline.cli.commands.key_descriptions import (
    UnknownKeyError,
    describe_key,
    describe_type,
    find_key,
    read_field_docstrings,
)
from pipeline.config.recipe import TrainSpec
from pipeline.core.errors import UsageError


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"type": "integer", "maximum": 2147483647, "minimum": 1}, "a whole number at least 1"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "a number above 0 at most 1"),
        ({"enum": ["a", "b"]}, "one of a, b"),
        (
            {"enum": [str(n) for n in range(20)]},
            f"one of {', '.join(map(str, range(12)))}, ... (20)",
        ),
        ({"type": "array", "items": {"$ref": "#/$defs/Rule"}}, "a list of a section of keys"),
        ({"type": "array", "prefixItems": [{"type": "integer"}]}, "a list"),
        ({"anyOf": [{"enum": ["a"]}, {"type": "null"}]}, "one of a, or null"),
        ({"anyOf": [{"enum": ["a"]}, {"anyOf": [{"$ref": "#/$defs/Rule"}]}]}, "one of a"),
        ({"const": "auto"}, "auto"),
        ({}, "a value"),
    ],
)
def test_types_are_described_in_words(node: dict[str, Any], text: str) -> None:
    schema = {"$defs": {"Rule": {"type": "object", "properties": {}}}}
    assert describe_type(node, schema) == text


def test_docstrings_of_fields_include_those_of_bases() -> None:
    texts = read_field_docstrings(TrainSpec)
    assert texts["epochs"] == "The length in epochs: readings of the training split."
    assert texts["iterations_per_loop"].startswith("TensorFlow's adapter, for `sink_size`")
    assert "\n" not in texts["sink_size"]


@pytest.mark.medium
def test_components_with_a_key_are_named() -> None:
    described = {item.component: item for item in describe_key(["train", "optimizer", "lr"])}
    assert described["momentum"].default == 0.01
    assert described["adam"].default == 0.001
    with pytest.raises(UnknownKeyError) as caught:
        describe_key(["train", "optimizer", "rate"])
    assert {"lr", "momentum", "weight_decay"} <= set(caught.value.known)


def test_keys_are_found_by_their_last_part() -> None:
    assert find_key(["every_epochs"]) == ["checkpoint.every_epochs", "eval.every_epochs"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("lr", "train.optimizer.lr"),
        ("learning_rate", "train.optimizer.lr"),
        ("train.lr", "train.optimizer.lr"),
        ("features", "train.features"),
        ("metrics", "eval.metrics"),
        ("callbacks", "train.callbacks"),
        ("eval.every", None),
    ],
)
def test_keys_of_components_and_synonyms_are_found(typed: str, key: str | None) -> None:
    assert find_key(typed.split(".")) == ([key] if key else [])


@pytest.mark.medium
def test_help_shows_the_only_key_of_a_name_with_a_valid_example() -> None:
    assert render_key("learning_rate").startswith("train.optimizer.lr: a number")
    assert render_key("metrics").startswith("eval.metrics: a list")
    assert render_key("epochs").endswith(" train.epochs=10\n")
    with pytest.raises(UsageError, match=r"did you mean train\.optimizer\.lr\?"):
        render_key("train.lr")
    assert find_key("nothing") == []
