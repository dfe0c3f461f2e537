from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.core.registry import list_components
from pipeline.models.layers.model_spec import Layer, Layers, LayerSpec
from pipeline.models.layers.standard import (
    BatchNorm,
    Conv,
    Dense,
    Dropout,
    LayerNorm,
    MaxPool,
    Relu,
    Residual,
)


def layer(written: Any) -> LayerSpec:
    return TypeAdapter(Layer).validate_python(written)


def test_layer_name_stands_for_its_defaults() -> None:
    assert layer("relu") == Relu()


def test_layers_can_be_nested() -> None:
    written = [{"name": "residual", "body": [{"name": "conv", "features": 4, "kernel": [3, 1]}]}]
    (residual,) = TypeAdapter(Layers).validate_python(written)
    assert residual == Residual(body=(Conv(features=4, kernel=(3, 1)),))


def test_defaults_match_mindspore() -> None:
    conv = Conv(features=4, kernel=3)
    assert (conv.padding, conv.stride, conv.dilation, conv.bias) == ("same", 1, 1, False)
    assert Dense(features=4).bias
    assert (BatchNorm().momentum, BatchNorm().epsilon) == (0.9, 1e-5)
    assert LayerNorm().epsilon == 1e-7
    assert (MaxPool(kernel=2).stride, MaxPool(kernel=2).padding) == (None, "valid")
    assert Dropout().rate == 0.5


def test_layer_docstrings_are_unique() -> None:
    texts = [cls.__doc__ for cls in list_components("layer").values()]
    assert len(texts) == 54
    assert len(set(texts)) == 54


@pytest.mark.parametrize(
    "written",
    [
        {"name": "conv", "features": 4},
        {"name": "dropout", "rate": 1.0},
        {"name": "batch_norm", "momentum": 1.5},
        {"name": "sequence", "body": [], "repeat": 0},
        {"name": "relu", "slope": 0.1},
        {"name": "rely"},
    ],
)
def test_invalid_layers_are_refused(written: Any) -> None:
    with pytest.raises(ValidationError):
        layer(written)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("features", 0, r"a whole number above 0, or \$classes"),
        ("features", "classes", r"a whole number above 0, or \$classes"),
        ("kernel", "3", r"a whole number above 0, or \[height, width\]"),
        ("stride", [1, 1, 1], r"a whole number above 0, or \[height, width\]"),
        ("padding", "full", r"same, valid, symmetric, a whole number or \[\[top, bottom"),
        ("padding", [[1, -1], [0, 0]], r"same, valid, symmetric, a whole number"),
    ],
)
def test_error_of_a_union_field_is_one_sentence(field: str, value: Any, expected: str) -> None:
    with pytest.raises(ValidationError, match=f"must be {expected}") as caught:
        layer({"name": "conv", "features": 4, "kernel": 3, field: value})
    assert [details["loc"] for details in caught.value.errors()] == [("conv", field)]


def test_conv_refuses_groups_that_do_not_divide_its_features() -> None:
    with pytest.raises(ValidationError, match="features 10 is not a multiple of groups 4"):
        Conv(features=10, kernel=3, groups=4)


@pytest.mark.parametrize("padding", [2, [[0, 0], [0, 3]]])
def test_pool_refuses_padding_as_large_as_its_window(padding: Any) -> None:
    with pytest.raises(ValidationError, match=r"padding [23] must be less than kernel [23]"):
        layer({"name": "max_pool", "kernel": [2, 3], "padding": padding})
    assert layer({"name": "avg_pool", "kernel": [2, 3], "padding": [[1, 1], [2, 0]]})


def test_conv_features_may_be_the_classes() -> None:
    assert Conv(features="$classes", kernel=1, groups=2).features == "$classes"
