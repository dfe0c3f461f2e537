"""Networks with branches: GoogLeNet, Inception v3, DenseNet, dual path networks and U-Net."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from tests.models.build import (
    QUICK,
    conf_model,
    count,
    draw_variables,
    parameters,
    positions,
    random,
    shapes,
)

SMALL = {"widths": [3, 4, 5]}


@pytest.mark.medium
def test_unet_depths_halve_and_restore_the_image_size() -> None:
    seen = positions(conf_model("unet").build(7, "float32"), (32, 48, 3))
    deepest = "below0/branch_1/below1/branch_1/below2/branch_1/below3"
    assert seen["conv_1"] == (32, 48, 64)
    assert seen[f"{deepest}/branch_1/conv_1"] == (2, 3, 1024)
    assert seen[deepest] == (4, 6, 2 * 512)
    assert seen["conv_4"] == (32, 48, 7)


@pytest.mark.slow
def test_unet_depths_enlarge_the_receptive_field() -> None:
    module = conf_model("unet", **SMALL, batch_norm=False).build(2, "float32")
    images = random(1, 32, 32, 1)
    variables = draw_variables(shapes(module, images.shape[1:]))
    changed = images.copy()
    changed[0, 0, 0] += 1
    compute = jax.jit(lambda x: module.apply(variables, x, train=False), compiler_options=QUICK)
    before, after = compute(images), compute(changed)
    rows = np.flatnonzero(np.abs(after - before).max((0, 2, 3)) > 0)
    # Four 3x3 convolutions in the size of the image would reach 4 pixels.
    assert 12 < rows.max() < 31


@pytest.mark.medium
def test_unet_without_batch_norm_has_convolution_biases() -> None:
    paths = parameters(
        shapes(conf_model("unet", batch_norm=False).build(2, "float32"), (32, 32, 3))
    )
    assert "conv_0/bias" in paths
    assert not any("batch_norm" in path for path in paths)


@pytest.mark.medium
def test_unet_refuses_image_sides_not_divisible_by_its_depth() -> None:
    with pytest.raises(ValueError, match="below2: the branches return shapes"):
        shapes(conf_model("unet").build(2, "float32"), (36, 32, 3))


def test_unet_needs_more_than_one_depth() -> None:
    with pytest.raises(ValidationError, match="widths"):
        conf_model("unet", widths=[64])


@pytest.mark.slow
def test_googlenet_modules_have_the_published_shapes() -> None:
    seen = positions(conf_model("googlenet").build(1000, "float32"), (224, 224, 3))
    modules = {path: shape for path, shape in seen.items() if "/" not in path and "incep" in path}
    assert modules == {
        "inception3a": (28, 28, 256),
        "inception3b": (28, 28, 480),
        "inception4a": (14, 14, 512),
        "inception4b": (14, 14, 512),
        "inception4c": (14, 14, 512),
        "inception4d": (14, 14, 528),
        "inception4e": (14, 14, 832),
        "inception5a": (7, 7, 832),
        "inception5b": (7, 7, 1024),
    }


@pytest.mark.slow
def test_googlenet_width_scales_convolutions() -> None:
    seen = positions(conf_model("googlenet", width=0.5).build(10, "float32"), (64, 64, 3))
    assert seen["conv_0"][-1] == 32
    assert seen["inception5b"][-1] == 512


@pytest.mark.slow
def test_inception_v3_modules_have_the_published_shapes() -> None:
    seen = positions(conf_model("inception_v3").build(1000, "float32"), (299, 299, 3))
    assert [seen[f"conv_{index}"] for index in range(5)] == [
        (149, 149, 32),
        (147, 147, 32),
        (147, 147, 64),
        (73, 73, 80),
        (71, 71, 192),
    ]
    assert seen["square0"] == (35, 35, 256)
    assert seen["square2"] == (35, 35, 288)
    assert seen["reduction0"] == (17, 17, 768)
    assert seen["factored3"] == (17, 17, 768)
    assert seen["reduction1"] == (8, 8, 1280)
    assert seen["expanded1"] == (8, 8, 2048)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("growth", "blocks", "expected"),
    [(32, [6, 12, 48, 32], 20_013_928), (48, [6, 12, 36, 24], 28_681_000)],
)
def test_densenet201_and_161_parameter_counts_match_torchvision(
    growth: int, blocks: list[int], expected: int
) -> None:
    module = conf_model("densenet121", growth=growth, blocks=blocks).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


@pytest.mark.slow
def test_densenet_blocks_grow_and_transitions_halve() -> None:
    seen = positions(conf_model("densenet121").build(10, "float32"), (224, 224, 3))
    assert seen["block1_layer0"] == (56, 56, 96)
    assert seen["block1_layer5"] == (56, 56, 256)
    assert seen["conv_1"] == (56, 56, 128)
    assert seen["block2_layer11"] == (28, 28, 512)
    assert seen["block4_layer15"] == (7, 7, 1024)


@pytest.mark.slow
def test_dpn98_parameter_count_matches_timm() -> None:
    changes: dict[str, Any] = {
        "stem": 96,
        "inner": 160,
        "groups": 40,
        "blocks": [3, 6, 20, 3],
        "growths": [16, 32, 32, 128],
    }
    module = conf_model("dpn92", **changes).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == 61_570_728


@pytest.mark.slow
def test_dpn_blocks_append_and_stages_restart_the_growth() -> None:
    seen = positions(conf_model("dpn92").build(10, "float32"), (224, 224, 3))
    assert seen["stage1_block0"] == (56, 56, 256 + 3 * 16)
    assert seen["stage1_block2"] == (56, 56, 256 + 5 * 16)
    assert seen["stage2_block0"] == (28, 28, 512 + 3 * 32)
    assert seen["stage4_block2"] == (7, 7, 2048 + 5 * 128)


def test_dpn_stages_need_blocks_and_growths() -> None:
    with pytest.raises(ValidationError, match="must have one entry per stage each"):
        conf_model("dpn92", growths=[16])
