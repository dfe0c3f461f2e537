"""ConvNeXt-T has the published network's parameters and shapes.

Swin-T: its parameters, its windows, and what its priced step converts.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.backends.ascend.published.vision_networks import (
    MASKED,
    ConvNeXt,
    PatchMerging,
    Swin,
    WindowAttention,
    dbnet,
    index_distances,
    join_windows,
    mask_shifted,
    split_windows,
)
from pipeline.backends.ascend.published.workloads import load_published_steps, trace_row
from tests.backends.ascend.steps import find_round_trips, only
from tests.models.build import conf_model, count, initialise, positions, random, shapes

WIDTHS = {
    "resnet18": (64, 128, 256, 512),
    "resnet50": (256, 512, 1024, 2048),
    "mobilenet_v3_large": (24, 40, 112, 960),
}
HEADLESS = {
    "resnet18": 11_689_512 - 513 * 1000,
    "resnet50": 25_557_032 - 2049 * 1000,
    "mobilenet_v3_large": 5_483_032 - 961 * 1280 - 1281 * 1000,
}
"""Parameters of torchvision's networks without their classifiers."""


@pytest.mark.medium
def test_convnext_tiny_has_the_published_parameters() -> None:
    """28,589,128, as in torchvision's and timm's convnext_tiny."""
    images = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    network = ConvNeXt(1000)
    variables = jax.eval_shape(lambda x: network.init(jax.random.key(0), x, False), images)
    leaves = jax.tree.leaves(variables)
    assert sum(math.prod(leaf.shape) for leaf in leaves) == 28_589_128
    rngs = {"dropout": jax.random.key(1)}
    logits = jax.eval_shape(lambda v, x: network.apply(v, x, True, rngs=rngs), variables, images)
    assert logits.shape == (2, 1000)


@pytest.mark.slow
def test_parameter_count_matches_torchvision() -> None:
    """torchvision's swin_t has 28,288,354."""
    assert count(shapes(Swin(1000), (224, 224, 3))) == 28_288_354


@pytest.mark.medium
def test_joined_windows_equal_the_tokens_before_the_split() -> None:
    tokens = jnp.arange(2 * 14 * 21 * 3).reshape(2, 14, 21, 3)
    windows = split_windows(tokens)
    assert windows.shape == (2 * 2 * 3, 49, 3)
    np.testing.assert_array_equal(windows[1, 0], tokens[0, 0, 7])
    np.testing.assert_array_equal(join_windows(windows, 2, 14, 21), tokens)


def test_distance_index_is_over_rows_and_columns() -> None:
    distances = index_distances()
    assert distances.shape == (49, 49)
    assert (np.diag(distances) == 6 * 13 + 6).all()
    assert len(np.unique(distances)) == 13**2


def test_shifted_mask_allows_only_former_neighbours() -> None:
    mask = mask_shifted(14, 14, 3)
    assert mask.shape == (4, 49, 49)
    assert not mask[0].any()
    assert set(np.unique(mask[3])) == {MASKED, 0.0}
    assert (mask[3] == 0).sum() == 16**2 + 12**2 * 2 + 9**2


@pytest.mark.medium
def test_mindcv_attention_with_the_joined_weights_equals_the_authors() -> None:
    windows = jax.random.normal(jax.random.key(0), (4, 49, 64))
    mask = mask_shifted(14, 14, 3)
    authors = WindowAttention()
    joined = authors.init(jax.random.key(1), windows, mask)["params"]
    kernels = jnp.split(joined["qkv"]["kernel"], 3, -1)
    split = {"bias": joined["bias"], "project": joined["project"]}
    for name, kernel in zip(("query", "key", "value"), kernels, strict=True):
        split[name] = {"kernel": kernel, "bias": jnp.zeros(64)}
    np.testing.assert_allclose(
        WindowAttention(mindcv=True).apply({"params": split}, windows, mask),
        authors.apply({"params": joined}, windows, mask),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.medium
def test_mindcv_merging_equals_the_authors() -> None:
    tokens = jax.random.normal(jax.random.key(0), (2, 4, 6, 8))
    params = PatchMerging().init(jax.random.key(1), tokens)
    merged = [PatchMerging(mindcv).apply(params, tokens) for mindcv in (False, True)]
    assert merged[0].shape == (2, 2, 3, 16)
    np.testing.assert_array_equal(*merged)


@pytest.mark.slow
@pytest.mark.parametrize("by_op", [False, True])
def test_tokens_are_not_converted_back_to_convolution_blocks(by_op: bool) -> None:
    row = next(row for row in load_published_steps() if row.model == "swin_t")
    graph = trace_row(row).tasks("O2", by_op=by_op)
    blocked = [
        task
        for task in only(graph, "trans_data")
        if "NC1HWC0" in {graph.buffers[index].layout for index in (*task.reads, *task.writes)}
    ]
    assert len(blocked) <= 4
    assert not find_round_trips(graph)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", WIDTHS)
def test_parameter_count_is_backbone_pyramid_and_heads(backbone: Any) -> None:
    pyramid = 256 * sum(WIDTHS[backbone]) + 4 * 9 * 256 * 64
    head = 9 * 256 * 64 + 2 * 64 + (4 * 64 * 64 + 64) + 2 * 64 + (4 * 64 + 1)
    expected = HEADLESS[backbone] + pyramid + 2 * head
    assert count(shapes(dbnet(conf_model(backbone)), (640, 640, 3))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("backbone", WIDTHS)
def test_pyramid_reads_every_scale_and_maps_have_image_size(backbone: Any) -> None:
    seen = positions(dbnet(conf_model(backbone)), (640, 640, 3))
    assert {stride: seen[f"lateral{stride}"] for stride in (4, 8, 16, 32)} == {
        4: (160, 160, 256),
        8: (80, 80, 256),
        16: (40, 40, 256),
        32: (20, 20, 256),
    }
    assert seen["smooth32"] == (160, 160, 64)
    assert seen["probability"] == (640, 640, 1)
    assert seen["__call__"] == (640, 640, 3)


@pytest.mark.slow
def test_binary_map_is_a_steep_step_at_the_threshold() -> None:
    changes: dict[str, Any] = {"blocks": [1] * 4, "widths": [4] * 4, "stem": "imagenet"}
    module = dbnet(conf_model("resnet20", **changes), features=8)
    images = random(2, 32, 64, 3)
    variables = initialise(module, images)
    apply = jax.jit(lambda v, x: module.apply(v, x, train=True, mutable=["batch_stats"])[0])
    maps = np.asarray(apply(variables, images), np.float64)
    assert maps.shape == (2, 32, 64, 3)
    probability, threshold, binary = np.moveaxis(maps, -1, 0)
    assert ((probability > 0) & (probability < 1) & (threshold > 0) & (threshold < 1)).all()
    np.testing.assert_allclose(
        binary, 1 / (1 + np.exp(-50 * (probability - threshold))), rtol=1e-3, atol=1e-6
    )


def test_images_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 640, 600, 3\): must be .* multiples of 32"):
        shapes(dbnet(conf_model("resnet18")), (640, 600, 3))
