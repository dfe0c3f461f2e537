from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.models.layers.standard import Conv, Dense, Relu, Sequence
from pipeline.models.networks.layers import LayerList, expand_uses
from tests.models.build import conf_model, parameters, shapes

HEAD = ["flatten", {"name": "dense", "features": "$classes"}]
CONV = {"name": "conv", "features": "$features", "kernel": "$kernel"}
BLOCKS = {"pair": [CONV, "relu"]}
USE = {"use": "pair", "with": {"features": 8, "kernel": 3}}
PAIR = (Conv(features=8, kernel=3), Relu())


def problems(**changes: Any) -> dict[str, str]:
    """Problems of the example with some keys changed, by dotted location."""
    with pytest.raises(ValidationError) as caught:
        conf_model("layers", **changes)
    return {".".join(map(str, d["loc"])): d["msg"] for d in caught.value.errors()}


def test_layers_of_a_block_have_its_scope() -> None:
    variables = shapes(conf_model("layers").build(10, "float32"), (32, 32, 3))
    kernels = [path for path in parameters(variables) if path.endswith("kernel")]
    assert kernels == [
        "conv_block_0/conv_0/kernel",
        "conv_block_0/conv_1/kernel",
        "conv_block_1/conv_0/kernel",
        "conv_block_1/conv_1/kernel",
        "conv_block_2/conv_0/kernel",
        "dense_0/kernel",
    ]


@pytest.mark.parametrize(
    "layers",
    [
        HEAD,
        [{"name": "sequence", "body": HEAD}],
        ["flatten", {"use": "head"}],
        [{"name": "branches", "branches": [[{"use": "flat_head"}]]}],
    ],
)
def test_classes_placeholder_is_replaced_at_any_depth(layers: list[Any]) -> None:
    model = conf_model("layers", blocks={"head": [HEAD[1]], "flat_head": HEAD}, layers=layers)
    (kernel,) = [
        leaf.shape
        for path, leaf in parameters(shapes(model.build(7, "float32"), (2, 2, 1))).items()
        if path.endswith("kernel")
    ]
    assert kernel == (4, 7)


def test_vocabulary_may_be_the_classes() -> None:
    tokens = {"name": "tied_embedding", "vocabulary": "$classes", "features": 3, "body": []}
    module = conf_model("layers", blocks={}, layers=[tokens]).build(7, "float32")
    assert parameters(shapes(module, (2, 1, 1)))["tied_embedding_0/table"].shape == (7, 3)


def test_layers_without_classes_are_refused() -> None:
    said = problems(layers=["flatten", {"name": "dense", "features": 10}])
    assert said == {
        "": "Value error, no layer has $classes; must end in a layer such as "
        "{name: dense, features: $classes}, or to match pairs in branches with inputs"
    }


def test_towers_need_no_classes() -> None:
    """The embeddings of branches with inputs are compared with each other."""
    towers = {"name": "branches", "inputs": ["a", "b"], "branches": [["relu"]]}
    assert conf_model("layers", blocks={}, layers=[towers]).list_inputs() == ("a", "b")
    assert "" in problems(layers=[{**towers, "inputs": []}])


def test_layer_problems_are_located_in_the_list() -> None:
    said = problems(layers=["relu", {"name": "dense", "featurs": 10}, *HEAD])
    assert set(said) == {"layers.1.dense.features", "layers.1.dense.featurs"}


def test_block_problems_are_located_in_the_block() -> None:
    said = problems(blocks={"b": ["relo"]}, layers=[{"use": "b"}, *HEAD])
    assert set(said) == {"blocks.b.0"}


def test_block_use_problems_are_located_in_the_list() -> None:
    assert set(problems(layers=["relu", {"use": "b"}, *HEAD])) == {"layers.1.use"}
    use = {"use": "conv_block", "repeat": 0, "times": 2, "with": {"features": 4}}
    assert set(problems(layers=[use, *HEAD])) == {"layers.0.repeat", "layers.0.times"}


@pytest.mark.parametrize("changes", [{"blocks": ["relu"]}, {"blocks": {"b": "relu"}}])
def test_blocks_must_be_lists_by_name(changes: Any) -> None:
    assert any(where.startswith("blocks") for where in problems(**changes, layers=HEAD))


def test_expanded_network_is_unchanged_after_dump_and_load() -> None:
    model = conf_model("layers")
    assert LayerList.model_validate(model.model_dump(mode="json")) == model


def test_layer_list_can_be_constructed_in_python() -> None:
    init = conf_model("layers").init
    model = LayerList(init=init, blocks={}, layers=(Dense(features="$classes"),))
    assert model.layers_for(3) == (Dense(features=3),)


def test_schema_allows_a_block_use_in_every_list_of_layers() -> None:
    schema = TypeAdapter(LayerList).json_schema()
    views = schema["$defs"]["Views"]["properties"]["body"]
    for layers in (schema["properties"]["layers"], views):
        assert layers["items"]["anyOf"][0]["required"] == ["use"]


def test_name_of_a_block_must_be_a_text() -> None:
    said = problems(blocks={1: ["relu"], "a": ["relu"]}, layers=[{"use": "b"}, *HEAD])
    assert said == {"blocks.1": "Value error, the name of a block must be a text, such as block_1"}


def test_problem_of_a_value_is_located_at_the_use() -> None:
    blocks = {"a": [{"name": "dense", "features": "$width"}], "b": [{"use": "a", "with": {}}]}
    used = {"use": "a", "with": {"width": -1}}
    said = problems(blocks=blocks, layers=["relu", used, *HEAD])
    ((where, text),) = said.items()
    assert where == "layers.1.with.width"
    assert text.startswith("Value error, makes blocks.a.0.features = -1: must be a whole number")
    blocks["b"] = [{"use": "a", "with": {"width": "$size"}}]
    said = problems(blocks=blocks, layers=[{"use": "b", "with": {"size": -1}}, *HEAD])
    assert set(said) == {"blocks.b.0.with.width"}


def test_equal_value_of_a_block_is_not_blamed_on_the_use() -> None:
    blocks = {"a": [{"name": "dense", "features": 0}, {"name": "dropout", "rate": "$rate"}]}
    said = problems(blocks=blocks, layers=[{"use": "a", "with": {"rate": 0}}, *HEAD])
    assert set(said) == {"blocks.a.0.dense.features"}


def test_list_of_a_use_is_blamed() -> None:
    blocks = {"a": [{"name": "conv", "features": 4, "kernel": "$kernel"}]}
    said = problems(blocks=blocks, layers=[{"use": "a", "with": {"kernel": [3, 0]}}, *HEAD])
    assert set(said) == {"layers.0.with.kernel"}


@pytest.mark.parametrize("nested", [["$x", "$x"], {"a": "$x", "b": "$x"}], ids=["list", "object"])
def test_values_that_grow_exponentially_are_refused(nested: Any) -> None:
    blocks: dict[str, Any] = {
        f"b{number}": [{"use": f"b{number + 1}", "with": {"x": nested}}] for number in range(60)
    }
    blocks["b60"] = [{"name": "dense", "features": "$x"}]
    where, text = problem([{"use": "b0", "with": {"x": 1}}], blocks)
    assert where.endswith(".with")
    assert text == "Value error, parameters of blocks stand for more than 100,000 values"


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
        ({"scope": "a/b"}, "layers.0.scope", "string_pattern_mismatch"),
    ],
)
def test_problems_of_a_block_use_are_located(changes: Any, where: str, kind: str) -> None:
    with pytest.raises(ValidationError) as caught:
        expand([{**USE, **changes}])
    (details,) = caught.value.errors()
    assert (".".join(map(str, details["loc"])), details["type"]) == (where, kind)


def test_block_name_that_cannot_be_a_scope_is_located() -> None:
    """It names parameters, unless each use has a scope."""
    where, message = problem([{"use": "res-block"}], {"res-block": ["relu"]})
    assert where == "layers.0.use"
    assert "block 'res-block' can't name a scope, which must match ^\\w+$; give the" in message
    where, _ = problem([{"use": "a"}], {"a": ["relu", {"use": "b.c"}], "b.c": ["relu"]})
    assert where == "blocks.a.1.use"
    (entry,) = expand([{"use": "res-block", "scope": "neck"}], {"res-block": ["relu"]})
    assert entry.scope == "neck"


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
