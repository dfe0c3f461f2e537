"""Residual networks and their kin: RegNet, RepVGG and Xception."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pydantic import ValidationError

from pipeline import load_recipe
from pipeline.models.blocks.common_blocks import map_layers
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Conv
from pipeline.training.update import reinitialize
from tests.models.build import conf_model, count, parameters, positions, shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"blocks": [3, 4, 23, 3], "groups": 32, "group_width": 8}, 88_791_336),
        ({"blocks": [3, 4, 23, 3], "squeeze": 16}, 49_326_872),
    ],
)
def test_resnext101_and_se_resnet101_have_reference_parameter_counts(
    changes: dict[str, Any], expected: int
) -> None:
    module = conf_model("resnet50", **changes).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


@pytest.mark.medium
def test_documented_resnet50_has_same_padding_and_small_weights() -> None:
    """M-03."""
    model = load_recipe("resnet50_cifar10").model
    convolutions: list[Conv] = []

    def note(layer: LayerSpec) -> LayerSpec:
        if isinstance(layer, Conv):
            convolutions.append(layer)
        return layer

    map_layers(note, model.layers_for(10))
    assert len(convolutions) == 53
    assert {layer.padding for layer in convolutions} == {"same"}
    weights = {"conv_0": {"kernel": jnp.ones((3, 3, 64, 64))}}
    (kernel,) = jax.tree.leaves(reinitialize(weights, model.init.rules, jax.random.key(0)))
    assert float(kernel.std()) == pytest.approx(0.01, rel=0.02)


def test_se_resnet_bodies_end_with_squeeze_and_excitation() -> None:
    layers = conf_model("se_resnet18").layers_for(10)
    assert {layer.body[-1].name for layer in layers if layer.name == "residual"} == {"gate"}


@pytest.mark.parametrize("changes", [{"groups": 2}, {"group_width": 128}])
def test_resnet_basic_blocks_refuse_groups(changes: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError, match="are for bottlenecks; must be 1 and 64 for basic blocks"
    ):
        conf_model("resnet18", **changes)


@pytest.mark.medium
def test_resnet20_has_19_convolutions_and_two_shortcuts() -> None:
    variables = shapes(conf_model("resnet20").build(10, "float32"), (32, 32, 3))
    body = 432 + 6 * 9 * 16 * 16 + 9 * (16 * 32 + 32 * 64) + 5 * 9 * (32 * 32 + 64 * 64)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    shortcuts = 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64
    assert count(variables) == body + norms + shortcuts + 65 * 10 == 272_474


def tiny(block: str, **changes: Any) -> Any:
    sizes = {"blocks": [2, 1], "widths": [4, 8], "block": block, "stem": "cifar"}
    return conf_model("resnet20", **{**sizes, **changes})


def strided(layers: Any) -> list[tuple[int, int]]:
    """Kernel and stride of the convolutions in layers that move by more than one."""
    return [
        (layer.kernel, layer.stride)
        for layer in layers
        if layer.name == "conv" and layer.stride != 1
    ]


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_resnet_later_stages_are_strided_in_the_first_3x3(block: str) -> None:
    layers = tiny(block).layers_for(10)
    residuals = {layer.scope: layer for layer in layers if layer.name == "residual"}
    assert list(residuals) == ["stage1_block0", "stage1_block1", "stage2_block0"]
    assert strided(residuals["stage1_block0"].body) == []
    assert strided(residuals["stage2_block0"].body) == [(3, 2)]
    assert strided(residuals["stage2_block0"].shortcut) == [(1, 2)]


@pytest.mark.parametrize(("block", "first"), [("basic", 0), ("bottleneck", 2)])
def test_resnet_shortcuts_project_only_if_the_shape_changes(block: str, first: int) -> None:
    residuals = [layer for layer in tiny(block).layers_for(10) if layer.name == "residual"]
    assert [len(residual.shortcut) for residual in residuals] == [first, 0, 2]


@pytest.mark.slow
def test_resnet_stems_shrink_images_differently() -> None:
    def positions(stem: str) -> Any:
        module = tiny("basic", stem=stem).build(10, "float32")
        _, seen = jax.eval_shape(
            lambda images: module.init_with_output(
                jax.random.key(0), images, train=False, capture_intermediates=True
            ),
            jax.ShapeDtypeStruct((1, 32, 32, 3), "float32"),
        )
        return seen["intermediates"]["stage1_block0"]["__call__"][0].shape

    assert positions("cifar") == (1, 32, 32, 4)
    assert positions("imagenet") == (1, 8, 8, 4)


@pytest.mark.parametrize(("zero_init_last", "last"), [(True, 0.0), (False, 1.0)])
def test_resnet_zero_init_last_sets_the_last_norm_scale_to_zero(
    zero_init_last: bool, last: float
) -> None:
    layers = tiny("bottleneck", zero_init_last=zero_init_last).layers_for(10)
    residuals = [layer for layer in layers if layer.name == "residual"]
    assert residuals
    for residual in residuals:
        norms = [layer.scale_init for layer in residual.body if layer.name == "batch_norm"]
        assert norms == [1.0, 1.0, last]


@pytest.mark.parametrize(("blocks", "widths"), [([2, 2], [16]), ([], [])])
def test_resnet_stages_need_blocks_and_widths(blocks: list[int], widths: list[int]) -> None:
    with pytest.raises(ValidationError, match="must have one entry per stage each"):
        conf_model("resnet20", blocks=blocks, widths=widths)


@pytest.mark.slow
def test_wide_resnet28_10_has_the_published_parameter_count() -> None:
    module = conf_model("wide_resnet40_10", blocks=[4, 4, 4]).build(10, "float32")
    assert count(shapes(module, (32, 32, 3))) == 36_479_194


@pytest.mark.medium
def test_wide_resnet40_10_has_six_blocks_in_each_stage() -> None:
    stem, head = 27 * 16, 2 * 640 + 641 * 10
    first = sum(
        9 * (before * width + width * width) + before * width + 2 * (before + width)
        for before, width in ((16, 160), (160, 320), (320, 640))
    )
    others = 5 * sum(18 * width * width + 4 * width for width in (160, 320, 640))
    module = conf_model("wide_resnet40_10").build(10, "float32")
    assert count(shapes(module, (32, 32, 3))) == stem + first + others + head == 55_841_754


@pytest.mark.slow
def test_resnetv2_101_parameter_count_matches_keras_without_biases() -> None:
    module = conf_model("resnetv2_50", blocks=[3, 4, 23, 3]).build(1000, "float32")
    biases = 64 + 4 * (64 + 128 + 256 + 512) + 4 * (3 * 64 + 4 * 128 + 23 * 256 + 3 * 512)
    assert count(shapes(module, (224, 224, 3))) == 44_577_896 - biases


def test_resnet_v2_projection_follows_norm_and_relu() -> None:
    layers = conf_model("resnetv2_50").layers_for(10)
    blocks = {layer.scope: layer for layer in layers if layer.scope}
    norm, relu, residual = blocks["stage2_block0"].body
    assert (norm.name, relu.name, residual.name) == ("batch_norm", "relu", "residual")
    assert [layer.name for layer in residual.shortcut] == ["conv"]
    same = blocks["stage2_block1"]
    assert (same.name, same.shortcut) == ("residual", ())
    assert [layer.name for layer in same.body][:3] == ["batch_norm", "relu", "conv"]


@pytest.mark.medium
def test_resnet_v2_stages_after_the_first_halve_the_image() -> None:
    seen = positions(conf_model("resnetv2_50").build(10, "float32"), (224, 224, 3))
    assert seen["stage1_block2"] == (56, 56, 256)
    assert seen["stage4_block2"] == (7, 7, 2048)


@pytest.mark.parametrize(("blocks", "widths"), [([2, 2], [16]), ([], [])])
def test_resnet_v2_stages_need_blocks_and_widths(blocks: list[int], widths: list[int]) -> None:
    with pytest.raises(ValidationError, match="must have one entry per stage each"):
        conf_model("resnetv2_50", blocks=blocks, widths=widths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "widths", "group_width", "expected"),
    [
        ([1, 2, 7, 12], [32, 64, 160, 400], 16, 5_495_976),
        ([2, 4, 10, 2], [72, 168, 408, 912], 24, 9_190_136),
    ],
)
def test_regnet_parameter_counts_match_torchvision(
    blocks: list[int], widths: list[int], group_width: int, expected: int
) -> None:
    changes: dict[str, Any] = {"blocks": blocks, "widths": widths, "group_width": group_width}
    module = conf_model("regnet_x_800mf", **changes).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": [1]}, "must have one entry per stage each"),
        ({"group_width": 24}, r"must be multiples of group_width 24; 64 is not"),
    ],
)
def test_regnet_refuses_invalid_stages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        conf_model("regnet_x_800mf", **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"), [("repvgg_a0", 8_309_384), ("repvgg_a1", 12_789_864)]
)
def test_repvgg_deployed_parameter_count_matches_the_authors(name: str, expected: int) -> None:
    variables = shapes(conf_model(name).build(1000, "float32"), (224, 224, 3))
    convs = [leaf.shape for leaf in parameters(variables).values() if leaf.shape[:2] == (3, 3)]
    assert sum(9 * before * after + after for *_, before, after in convs) + 1281 * 1000 == expected


def test_repvgg_blocks_of_unchanged_shape_have_an_identity_norm() -> None:
    blocks = {layer.scope: layer for layer in conf_model("repvgg_a0").layers_for(10) if layer.scope}
    assert [layer.name for layer in blocks["stage1_block0"].shortcut] == ["conv", "batch_norm"]
    kept = blocks["stage1_block1"]
    assert [layer.name for layer in kept.shortcut] == ["batch_norm"]
    (convs,) = kept.body
    assert (convs.body[0].kernel, convs.shortcut[0].kernel) == (3, 1)
    assert len(blocks) == 22


def test_repvgg_parameter_count_has_all_branches() -> None:
    small = {"stem": 4, "blocks": [2], "widths": [4]}
    block = 9 * 16 + 16 + 2 * 8
    expected = (9 * 12 + 12 + 2 * 8) + block + (block + 8) + 5 * 10
    module = conf_model("repvgg_a0", **small).build(10, "float32")
    assert count(shapes(module, (32, 32, 3))) == expected


def test_repvgg_stages_need_blocks_and_widths() -> None:
    with pytest.raises(ValidationError, match="must have one entry per stage each"):
        conf_model("repvgg_a0", blocks=[1, 2])


@pytest.mark.slow
def test_xception_flows_have_the_published_shapes() -> None:
    seen = positions(conf_model("xception").build(1000, "float32"), (299, 299, 3))
    assert seen["conv_1"] == (147, 147, 64)
    assert seen["entry0"] == (74, 74, 128)
    assert seen["entry2"] == (19, 19, 728)
    assert seen["middle7"] == (19, 19, 728)
    assert seen["exit"] == (10, 10, 1024)
    assert seen["batch_norm_3"] == (10, 10, 2048)


def test_xception_blocks_alternate_depthwise_and_pointwise() -> None:
    layers = {layer.scope: layer for layer in conf_model("xception").layers_for(10) if layer.scope}
    convs = [layer for layer in layers["middle0"].body if layer.name == "conv"]
    assert [(conv.kernel, conv.groups) for conv in convs] == [(3, 728), (1, 1)] * 3
