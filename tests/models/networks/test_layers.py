from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.models.layers.standard import Dense
from pipeline.models.networks.layers import LayerList
from tests.models.build import conf_model, parameters, shapes

HEAD = ["flatten", {"name": "dense", "features": "$classes"}]


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
