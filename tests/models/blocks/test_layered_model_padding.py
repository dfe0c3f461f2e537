"""Where networks put their zeros: each key against the rows of zeros that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.models.blocks.layered_model import LayeredModelSpec, StridedModelSpec
from pipeline.models.layers.model_spec import LayerSpec, pair
from pipeline.models.layers.standard import Conv, Pool
from pipeline.models.modules.apply_layers import compute_pads
from tests.models.build import conf_model, shapes
from tests.models.test_conf import FILES

WITHOUT = {"alexnet": "MindSpore's zoo has `same`; torchvision's pads of 2 are no half of 11"}
"""Networks with a stride under `same` padding that have no key for it."""


def windows(value: Any) -> Iterator[Conv | Pool]:
    """The convolutions and pools of some layers, and of those inside of them."""
    if isinstance(value, Conv | Pool):
        yield value
    elif isinstance(value, LayerSpec):
        yield from windows(tuple(inner for _, inner in value))
    elif isinstance(value, tuple):
        for item in value:
            yield from windows(item)


def strided_same(model: LayeredModelSpec) -> bool:
    """Whether a window moves by more than a pixel under `same` padding."""
    return any(
        window.padding == "same" and pair(window.stride or window.kernel) != (1, 1)
        for window in windows(model.layers_for(10))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_network_documents_its_padding(name: str) -> None:
    model = conf_model(name)
    if isinstance(model, StridedModelSpec):
        assert strided_same(model)
        assert model.padding == "same"
    elif isinstance(model, LayeredModelSpec):
        assert strided_same(model) == (name in WITHOUT)
    else:
        assert name == "wide_deep", "reads tables, without windows"


@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x1_0", "efficientnet_b0"])
def test_symmetric_padding_applies_to_convolutions_or_also_pools(name: str) -> None:
    def paddings(**changes: Any) -> list[tuple[type[Any], object]]:
        found = windows(conf_model(name, **changes).layers_for(10))  # type: ignore[attr-defined]
        return [(Conv if isinstance(window, Conv) else Pool, window.padding) for window in found]

    same = paddings()
    convs = [(kind, "symmetric" if kind is Conv else padding) for kind, padding in same]
    assert paddings(padding="symmetric_convs") == convs
    assert paddings(padding="symmetric") == [(kind, "symmetric") for kind, _ in same]


@pytest.mark.slow
def test_parameters_do_not_depend_on_padding() -> None:
    same, other = (
        shapes(conf_model("resnet18", **changes).build(10, "float32"), (32, 32, 3))
        for changes in ({}, {"padding": "symmetric"})
    )
    assert same == other


def test_network_without_strided_same_padding_has_no_padding_key() -> None:
    with pytest.raises(ValidationError, match="padding"):
        conf_model("vgg11", padding="symmetric")


@given(st.integers(0, 40), st.integers(0, 3), st.sampled_from([1, 2]))
def test_same_and_symmetric_pads_are_equal_at_odd_sizes(
    half: int, radius: int, stride: int
) -> None:
    size, window, strides = stride * half + 1, 2 * radius + 1, (stride, stride)
    same, symmetric = (
        compute_pads((size, size), (window, window), strides, padding)
        for padding in ("same", "symmetric")
    )
    assert same == symmetric == ((radius, radius), (radius, radius))


def test_same_pads_are_at_the_end_at_even_sizes() -> None:
    sizes, window, strides = (64, 32), (7, 3), (2, 2)
    assert compute_pads(sizes, window, strides, "same") == ((2, 3), (0, 1))
    assert compute_pads(sizes, window, strides, "symmetric") == ((3, 3), (1, 1))
