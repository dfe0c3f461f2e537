"""Small networks: MobileNets, EfficientNet, ShuffleNet V2 and SqueezeNet."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.models.build import conf_model, count, parameters, positions, shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "last", "expected"),
    [([176, 352, 704], 1024, 3_503_624), ([244, 488, 976], 2048, 7_393_996)],
)
def test_wide_shufflenet_parameter_counts_match_torchvision(
    widths: list[int], last: int, expected: int
) -> None:
    module = conf_model("shufflenet_v2_x1_0", widths=widths, last=last).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


@pytest.mark.slow
def test_shufflenet_first_units_halve_and_later_units_split() -> None:
    model = conf_model("shufflenet_v2_x1_0")
    units = [layer for layer in model.layers_for(10) if layer.name == "branches"]
    assert [unit.split for unit in units] == [i not in (0, 4, 12) for i in range(16)]
    seen = positions(model.build(10, "float32"), (224, 224, 3))
    assert seen["stage2_unit0"] == (28, 28, 116)
    assert seen["stage4_unit3"] == (7, 7, 464)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": [4], "widths": [48, 96]}, "must have one entry per stage each"),
        ({"units": [4], "widths": [47]}, "multiple of 2"),
    ],
)
def test_shufflenet_refuses_invalid_stages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        conf_model("shufflenet_v2_x1_0", **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "expected"), [(0.25, 475_544 - 5_472), (0.5, 1_342_536 - 10_944)]
)
def test_narrow_mobilenet_v1_parameter_counts_match_keras(width: float, expected: int) -> None:
    module = conf_model("mobilenet_v1", width=width).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


def test_mobilenet_v1_alternates_depthwise_and_1x1_convolutions() -> None:
    convs = [layer for layer in conf_model("mobilenet_v1").layers_for(10) if layer.name == "conv"]
    depthwise = convs[1::2]
    assert [conv.groups for conv in depthwise] == [conv.features for conv in depthwise]
    assert [(conv.kernel, conv.groups) for conv in convs[2::2]] == [(1, 1)] * 13


@pytest.mark.medium
def test_mobilenet_v1_shrinks_images_32_times() -> None:
    seen = positions(conf_model("mobilenet_v1").build(10, "float32"), (224, 224, 3))
    assert seen["conv_26"] == (7, 7, 1024)


def test_mobilenet_v2_blocks_of_unchanged_shape_are_residual() -> None:
    blocks = [layer for layer in conf_model("mobilenet_v2").layers_for(10) if layer.scope]
    residual = [layer.scope for layer in blocks if layer.name == "residual"]
    assert len(blocks) == 17
    assert residual == [
        *("stage1_block1",),
        *(f"stage2_block{index}" for index in (1, 2)),
        *(f"stage3_block{index}" for index in (1, 2, 3)),
        *(f"stage4_block{index}" for index in (1, 2)),
        *(f"stage5_block{index}" for index in (1, 2)),
    ]


@pytest.mark.slow
def test_narrow_mobilenet_v2_keeps_the_last_convolution() -> None:
    seen = positions(conf_model("mobilenet_v2", width=0.75).build(10, "float32"), (224, 224, 3))
    assert seen["conv_0"] == (112, 112, 24)
    assert seen["stage6_block0"] == (7, 7, 240)
    assert seen["conv_1"] == (7, 7, 1280)
    wide = positions(conf_model("mobilenet_v2", width=1.4).build(10, "float32"), (64, 64, 3))
    assert wide["conv_1"] == (2, 2, 1792)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blocks", "gated", "last"),
    [
        ("mobilenet_v3_large", 15, [3, 4, 5, 10, 11, 12, 13, 14], (7, 7, 960)),
        ("mobilenet_v3_small", 11, [0, 3, 4, 5, 6, 7, 8, 9, 10], (7, 7, 576)),
    ],
)
def test_mobilenet_v3_sizes_differ_in_blocks_and_gates(
    name: str, blocks: int, gated: list[int], last: tuple[int, ...]
) -> None:
    model = conf_model(name)
    bodies = [layer.body for layer in model.layers_for(10) if layer.scope]
    assert len(bodies) == blocks
    found = [i for i, body in enumerate(bodies) if any(layer.name == "gate" for layer in body)]
    assert found == gated
    assert positions(model.build(10, "float32"), (224, 224, 3))["conv_1"] == last


def test_mobilenet_v3_first_block_does_not_expand() -> None:
    first, second, *_ = (
        layer for layer in conf_model("mobilenet_v3_large").layers_for(10) if layer.scope
    )
    assert [layer.kernel for layer in first.body if layer.name == "conv"] == [3, 1]
    assert [layer.kernel for layer in second.body if layer.name == "conv"] == [1, 3, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "depth", "expected"), [(1.1, 1.2, 9_109_994), (1.2, 1.4, 12_233_232)]
)
def test_efficientnet_b2_and_b3_parameter_counts_match_torchvision(
    width: float, depth: float, expected: int
) -> None:
    module = conf_model("efficientnet_b0", width=width, depth=depth).build(1000, "float32")
    assert count(shapes(module, (64, 64, 3))) == expected


def test_efficientnet_depth_adds_blocks() -> None:
    def blocks(name: str) -> int:
        return sum(layer.scope is not None for layer in conf_model(name).layers_for(10))

    assert (blocks("efficientnet_b0"), blocks("efficientnet_b1")) == (16, 23)


def fires(name: str) -> list[str]:
    """The kind of layer of each fire module."""
    layers = conf_model(name).layers_for(10)
    return [layer.name for layer in layers if layer.scope]


def test_squeezenet_residual_has_a_bypass_at_every_second_module() -> None:
    assert fires("squeezenet_residual") == ["sequence", "residual"] * 4
    assert fires("squeezenet1_0") == ["sequence"] * 8


@pytest.mark.slow
def test_squeezenet_versions_pool_at_different_modules() -> None:
    def sizes(name: str) -> list[int]:
        seen = positions(conf_model(name).build(10, "float32"), (227, 227, 3))
        return [seen[f"fire{number}"][0] for number in range(2, 10)]

    assert sizes("squeezenet1_0") == [55] * 3 + [27] * 4 + [13]
    assert sizes("squeezenet1_1") == [56] * 2 + [27] * 2 + [13] * 4


@pytest.mark.medium
def test_squeezenet_fire_module_expands_eight_times() -> None:
    module = conf_model("squeezenet1_0").build(10, "float32")
    kernels = parameters(shapes(module, (227, 227, 3)))
    assert kernels["fire9/conv_0/kernel"].shape == (1, 1, 512, 64)
    assert kernels["fire9/branches_0/branch_0/conv_0/kernel"].shape == (1, 1, 64, 256)
    assert kernels["fire9/branches_0/branch_1/conv_0/kernel"].shape == (3, 3, 64, 256)
