"""Detectors in one stage: bodies, images -> (batch, anchors, values), and their loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.backends.ascend.published.networks.parts import (
    bottleneck,
    conv,
    conv_norm,
    csp_stage,
    depthwise,
    flatten,
    max_pool,
    mobilenet_v2,
    norm,
    pyramid,
    relu6,
    resize,
    resnet,
    upsample,
)


def nearest(x: Array, size: Sequence[int]) -> Array:
    """Return maps of another size (height, width), whose pixels are repeated."""
    return resize(x, size, method="nearest")


def retinanet(x: Array, classes: int, depth: int) -> Array:
    """RetinaNet (Lin et al. 2017) with heads of their own on each of five levels."""
    levels = resnet(x, depth)
    maps = pyramid(levels[2:], 256, nearest)
    maps.append(conv(levels[-1], 256, 3, 2, use_bias=True))
    maps.append(conv(nn.relu(maps[-1]), 256, 3, 2, use_bias=True))
    outputs = []
    for level in maps:
        parts = []
        for values in (4, classes):
            y = level
            for _ in range(4):
                y = nn.relu(conv(y, 256, use_bias=True))
            parts.append(flatten([conv(y, 9 * values, use_bias=True)], values))
        outputs.append(jnp.concatenate(parts, -1))
    return jnp.concatenate(outputs, 1)


def focal_loss(outputs: Array, truth: Array) -> Array:
    """Return the focal loss of classes and the smooth L1 loss of boxes, of each sample.

    `truth` has a box and a class of each anchor: (batch, anchors, 5).
    """
    boxes, logits = outputs[..., :4], outputs[..., 4:]
    target = jax.nn.one_hot(truth[..., 4].astype(jnp.int32), logits.shape[-1])
    chances = nn.sigmoid(logits)
    match = target * chances + (1 - target) * (1 - chances)
    cross = jnp.maximum(logits, 0) - logits * target + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    weights = (0.25 * target + 0.75 * (1 - target)) * (1 - match) ** 2
    distance = jnp.abs(boxes - truth[..., :4])
    smooth = jnp.where(distance < 1, distance**2 / 2, distance - 0.5)
    positive = (truth[..., 4] > 0).astype(boxes.dtype)
    count = positive.sum(1) + 1
    return ((weights * cross).sum((1, 2)) + (smooth.mean(-1) * positive).sum(1)) / count


def _heads(maps: list[Array], anchors: list[int], classes: int, *, light: bool = False) -> Array:
    """Return boxes and classes of the anchors of maps, by a convolution each."""
    outputs = []
    for level, count in zip(maps, anchors, strict=True):
        parts = []
        for values in (4, classes):
            y = relu6(norm(depthwise(level))) if light else level
            y = conv(y, count * values, 1 if light else 3, use_bias=True)
            parts.append(flatten([y], values))
        outputs.append(jnp.concatenate(parts, -1))
    return jnp.concatenate(outputs, 1)


def ssd_mobilenet_v2(x: Array, classes: int) -> Array:
    """SSD (Liu et al. 2016) on MobileNetV2, with six levels and light heads."""
    levels = mobilenet_v2(x)
    maps = [levels[3], conv_norm(levels[4], 1280, 1, 1, relu6)]
    for features, expansion in ((512, 0.2), (256, 0.25), (256, 0.5), (64, 0.25)):
        maps.append(bottleneck(maps[-1], features, 3, 2, expansion=expansion))
    return _heads(maps, [3, *(6,) * 5], classes, light=True)


def ssd_mobilenet_v2_fpnlite(x: Array, classes: int) -> Array:
    """SSD on a pyramid of 128 channels of MobileNetV2, with separable convolutions."""
    levels = mobilenet_v2(x)[2:]
    maps = pyramid(levels, 128, nearest)
    maps.append(conv_norm(maps[-1], 128, 3, 2, relu6))
    maps.append(conv_norm(maps[-1], 128, 3, 2, relu6))

    def separable(x: Array) -> Array:
        return relu6(norm(conv(depthwise(x), 128, 1)))

    outputs = []
    for level in maps:
        parts = []
        for values in (4, classes):
            y = level
            for _ in range(4):
                y = separable(y)
            parts.append(flatten([conv(depthwise(y), 6 * values, 1, use_bias=True)], values))
        outputs.append(jnp.concatenate(parts, -1))
    return jnp.concatenate(outputs, 1)


def ssd_resnet34(x: Array, classes: int) -> Array:
    """SSD on ResNet-34 of MLPerf: the third stage isn't strided, five more levels."""
    x = resnet(x, 34, stride=8)[3]
    maps = [x]
    for features, stride in ((512, 2), (512, 2), (256, 2), (256, 2), (256, 2)):
        y = nn.relu(conv(maps[-1], features // 2, 1, use_bias=True))
        maps.append(nn.relu(conv(y, features, 3, stride, use_bias=True)))
    return _heads(maps, [4, 6, 6, 6, 4, 4], classes)


def ssd_resnet50_fpn(x: Array, classes: int) -> Array:
    """SSD on a pyramid of ResNet-50 (RetinaNet's heads, shared, with norms for each level)."""
    levels = resnet(x, 50)[2:]
    maps = pyramid(levels, 256, nearest)
    maps.append(conv_norm(maps[-1], 256, 3, 2))
    maps.append(conv_norm(maps[-1], 256, 3, 2))
    outputs = []
    for level in maps:
        parts = []
        for values in (4, classes):
            y = level
            for _ in range(4):
                y = conv_norm(y, 256)
            parts.append(flatten([conv(y, 6 * values, use_bias=True)], values))
        outputs.append(jnp.concatenate(parts, -1))
    return jnp.concatenate(outputs, 1)


def yolo_v3_resnet18(x: Array, classes: int) -> Array:
    """YOLOv3's neck and heads on ResNet-18, for three levels of three anchors."""
    levels = resnet(x, 18)[2:]
    outputs = []
    y = levels[-1]
    for place, features in ((2, 512), (1, 256), (0, 128)):
        if place < 2:
            up = upsample(conv_norm(y, features // 2, 1))
            y = jnp.concatenate([up, levels[place]], -1)
        for _ in range(2):
            y = conv_norm(conv_norm(y, features // 2, 1), features)
        y = conv_norm(y, features // 2, 1)
        head = conv(conv_norm(y, features), 3 * (5 + classes), 1, use_bias=True)
        outputs.append(flatten([head], 5 + classes))
    return jnp.concatenate(outputs, 1)


def yolo_v5_s(x: Array, classes: int) -> Array:
    """YOLOv5s (2020): focus, cross-stage-partial stages, pooling pyramid, two-way neck."""
    silu = nn.silu
    corners = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
    x = conv_norm(jnp.concatenate(corners, -1), 32, 3, 1, silu)
    levels = []
    for features, blocks in ((64, 1), (128, 3), (256, 3)):
        x = csp_stage(conv_norm(x, features, 3, 2, silu), features, blocks, silu)
        levels.append(x)
    x = conv_norm(conv_norm(x, 512, 3, 2, silu), 256, 1, 1, silu)
    x = jnp.concatenate([x, *(max_pool(x, size, 1) for size in (5, 9, 13))], -1)
    x = csp_stage(conv_norm(x, 512, 1, 1, silu), 512, 1, silu, adds=False)
    top = conv_norm(x, 256, 1, 1, silu)
    y = csp_stage(jnp.concatenate([upsample(top), levels[2]], -1), 256, 1, silu, adds=False)
    middle = conv_norm(y, 128, 1, 1, silu)
    y = csp_stage(jnp.concatenate([upsample(middle), levels[1]], -1), 128, 1, silu, adds=False)
    outputs = [y]
    for other, features in ((middle, 256), (top, 512)):
        y = jnp.concatenate([conv_norm(y, features // 2, 3, 2, silu), other], -1)
        y = csp_stage(y, features, 1, silu, adds=False)
        outputs.append(y)
    heads = [conv(y, 3 * (5 + classes), 1, use_bias=True) for y in outputs]
    return flatten(heads, 5 + classes)


def yolo_loss(outputs: Array, truth: Array) -> Array:
    """Return the losses of boxes, objects and classes, and of the best overlap with 50 boxes.

    `truth` has the values of each anchor, (batch, anchors, 5 + classes).
    """
    places, sizes = nn.sigmoid(outputs[..., :2]), jnp.exp(outputs[..., 2:4])
    low, high = places - sizes / 2, places + sizes / 2
    boxes = truth[:, :50, :4]
    left = jnp.maximum(low[:, :, None], boxes[:, None, :, :2])
    right = jnp.minimum(high[:, :, None], boxes[:, None, :, 2:])
    areas = jnp.maximum(right - left, 0).prod(-1)
    union = sizes.prod(-1)[:, :, None] + (boxes[..., 2] * boxes[..., 3])[:, None] - areas
    ignored = jax.lax.stop_gradient(((areas / union).max(-1) < 0.7).astype(outputs.dtype))
    objects = truth[..., 4]
    logits, target = outputs[..., 4:], truth[..., 4:]
    cross = jnp.maximum(logits, 0) - logits * target + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    confidence = cross[..., 0] * (objects + (1 - objects) * ignored)
    kinds = cross[..., 1:].sum(-1) * objects
    near = ((places - truth[..., :2]) ** 2 + (sizes - truth[..., 2:4]) ** 2).sum(-1) * objects
    return (confidence + kinds + near).sum(1)


def faceboxes(x: Array, classes: int) -> Array:
    """FaceBoxes (Zhang et al. 2017): rapid digestion, three inceptions, 21,824 anchors."""

    def both(x: Array) -> Array:
        return nn.relu(jnp.concatenate([x, -x], -1))

    x = max_pool(both(norm(conv(x, 24, 7, 4))), 3, 2)
    x = max_pool(both(norm(conv(x, 64, 5, 2))), 3, 2)
    for _ in range(3):
        parts = [conv_norm(x, 32, 1), conv_norm(max_pool(x, 3, 1), 32, 1)]
        parts.append(conv_norm(conv_norm(x, 24, 1), 32))
        parts.append(conv_norm(conv_norm(conv_norm(x, 24, 1), 32), 32))
        x = jnp.concatenate(parts, -1)
    maps = [x]
    maps.append(conv_norm(conv_norm(x, 128, 1), 256, 3, 2))
    maps.append(conv_norm(conv_norm(maps[-1], 128, 1), 256, 3, 2))
    return _heads(maps, [21, 1, 1], classes)


def siamfc(x: Array, classes: int) -> Array:
    """SiamFC (Bertinetto et al. 2016): the exemplar's features convolve the search image's.

    Images are pairs: the first 127 rows and columns of the last three channels are the exemplar.
    """

    class Features(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            options: Any = {"padding": "VALID"}
            x = max_pool(conv_norm(x, 96, 11, 2, use_bias=True, **options), 3, 2, "VALID")
            x = conv_norm(x, 256, 5, feature_group_count=2, use_bias=True, **options)
            x = max_pool(x, 3, 2, "VALID")
            x = conv_norm(x, 384, use_bias=True, **options)
            x = conv_norm(x, 384, feature_group_count=2, use_bias=True, **options)
            return conv(x, 256, feature_group_count=2, use_bias=True, **options)

    features = Features()
    exemplar, search = features(x[:, :127, :127, 3:]), features(x[..., :3])
    batch, _height, _width, _channels = exemplar.shape
    kernels = exemplar.transpose(1, 2, 3, 0)
    joined = search.transpose(1, 2, 0, 3).reshape(1, *search.shape[1:3], -1)
    scores = jax.lax.conv_general_dilated(
        joined,
        kernels,
        (1, 1),
        "VALID",
        feature_group_count=batch,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return 1e-3 * scores.transpose(3, 1, 2, 0)
