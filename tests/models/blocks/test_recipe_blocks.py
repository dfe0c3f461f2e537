from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.models.blocks.recipe_blocks import expand_uses
from pipeline.models.layers.standard import Conv, Relu, Sequence

CONV = {"name": "conv", "features": "$features", "kernel": "$kernel"}
BLOCKS = {"pair": [CONV, "relu"]}
USE = {"use": "pair", "with": {"features": 8, "kernel": 3}}
PAIR = (Conv(features=8, kernel=3), Relu())


def expand(layers: list[Any], blocks: dict[str, Any] = BLOCKS) -> Any:
    return expand_uses(layers, blocks, ("layers",))


def problem(layers: list[Any], blocks: dict[str, Any] = BLOCKS) -> tuple[str, str]:
    """Where the first problem is, dotted, and what it says."""
    with pytest.raises(ValidationError) as caught:
        expand(layers, blocks)
    first = caught.value.errors(include_url=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"]


def test_block_use_is_expanded_to_a_sequence() -> None:
    assert expand(["relu", USE, "tanh"]) == ["relu", Sequence(scope="pair_0", body=PAIR), "tanh"]


def test_block_uses_are_numbered_unless_scoped() -> None:
    expanded = expand([USE, {**USE, "scope": "neck"}, {**USE, "repeat": 2}])
    assert [sequence.scope for sequence in expanded] == ["pair_0", "neck", "pair_2"]
    assert [sequence.repeat for sequence in expanded] == [1, 1, 2]


def test_nested_layers_are_expanded() -> None:
    (entry,) = expand([{"name": "residual", "body": ["tanh", USE]}])
    assert entry["body"] == ["tanh", Sequence(scope="pair_0", body=PAIR)]


def test_nested_blocks_pass_parameters_on() -> None:
    blocks = {
        **BLOCKS,
        "twice": [{"use": "pair", "repeat": 2, "with": {"features": "$width", "kernel": 3}}],
    }
    (entry,) = expand([{"use": "twice", "with": {"width": 8}}], blocks)
    (inner,) = entry.body
    assert (inner.scope, inner.repeat, inner.body) == ("pair_0", 2, PAIR)


def test_classes_is_not_a_block_parameter() -> None:
    head = {"head": [{"name": "dense", "features": "$classes"}]}
    (entry,) = expand([{"use": "head"}], head)
    assert entry.body[0].features == "$classes"
    where, message = problem([{"use": "head", "with": {"classes": 10}}], head)
    assert where == "layers.0.with.classes"
    assert "block 'head' has no parameter 'classes'; it has none" in message


def test_unknown_block_is_reported_with_the_nearest() -> None:
    where, message = problem(["relu", {**USE, "use": "pairs"}])
    assert where == "layers.1.use"
    assert "there is no block 'pairs'; did you mean 'pair'?" in message


def test_missing_parameter_is_reported() -> None:
    where, message = problem([{"use": "pair", "with": {"features": 8}}])
    assert where == "layers.0.with"
    assert "block 'pair' needs a value for 'kernel'" in message


def test_unknown_parameter_is_reported_with_the_nearest() -> None:
    where, message = problem([{"use": "pair", "with": {**USE["with"], "feature": 8}}])
    assert where == "layers.0.with.feature"
    assert "block 'pair' has no parameter 'feature'; did you mean 'features'?" in message
    _, message = problem([{"use": "pair", "with": {**USE["with"], "depth": 8}}])
    assert "has no parameter 'depth'; it has features, kernel" in message


@pytest.mark.parametrize(
    ("changes", "where", "kind"),
    [
        ({"with": [8, 3]}, "layers.0.with", "dict_type"),
        ({"repeat": 0}, "layers.0.repeat", "greater_than"),
        ({"use": 3}, "layers.0.use", "string_type"),
        ({"times": 2}, "layers.0.times", "extra_forbidden"),
    ],
)
def test_problems_of_a_block_use_are_located(changes: Any, where: str, kind: str) -> None:
    with pytest.raises(ValidationError) as caught:
        expand([{**USE, **changes}])
    (details,) = caught.value.errors()
    assert (".".join(map(str, details["loc"])), details["type"]) == (where, kind)


def test_recursive_block_is_refused() -> None:
    blocks = {"a": [{"use": "b"}], "b": ["relu", {"use": "a"}]}
    where, message = problem([{"use": "a"}], blocks)
    assert where == "blocks.b.1.use"
    assert "a block can't use itself: a -> b -> a" in message


def test_bad_layer_in_a_block_is_reported_at_its_line() -> None:
    blocks = {"pair": ["relu", {"name": "conv", "features": "$features", "kernal": 3}]}
    with pytest.raises(ValidationError) as caught:
        expand([{"use": "pair", "with": {"features": 0}}], blocks)
    problems = {
        ".".join(map(str, details["loc"])): details["type"] for details in caught.value.errors()
    }
    assert problems == {
        "blocks.pair.1.conv.features": "expected",
        "blocks.pair.1.conv.kernel": "missing",
        "blocks.pair.1.conv.kernal": "extra_forbidden",
    }
