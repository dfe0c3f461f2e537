"""Networks that predict a value for each pixel or place: bodies, images -> maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.backends.ascend.published.networks.parts import (
    VGG16,
    avg_pool,
    conv,
    conv_norm,
    dropout,
    hrnet,
    max_pool,
    mobilenet_v2,
    norm,
    resize,
    resnet,
    shuffle_pixels,
    squeeze,
    transposed,
    vgg,
)


def dncnn(x: Array, classes: int) -> Array:
    """DnCNN of 17 layers (Zhang et al. 2017), on grey patches."""
    y = nn.relu(conv(x, 64))
    for _ in range(15):
        y = conv_norm(y, 64)
    return x - conv(y, x.shape[-1])


def brdnet(x: Array, classes: int) -> Array:
    """BRDNet (Tian et al. 2020): a deep branch and a dilated one."""
    first, second = x, x
    for _ in range(16):
        first = conv_norm(first, 64, use_bias=True)
    first = x - conv(first, x.shape[-1], use_bias=True)
    second = conv_norm(second, 64, use_bias=True)
    for layer in range(2, 16):
        if layer in (9, 16):
            second = conv_norm(second, 64, use_bias=True)
        else:
            second = nn.relu(conv(second, 64, kernel_dilation=2, use_bias=True))
    second = conv_norm(second, 64, use_bias=True)
    second = x - conv(second, x.shape[-1], use_bias=True)
    joined = jnp.concatenate([first, second], -1)
    return x - conv(joined, x.shape[-1], use_bias=True)


def rdn(x: Array, classes: int) -> Array:
    """RDN (Zhang et al. 2018a): 16 dense blocks of 8 layers, for twice the size."""
    first = conv(x, 64, use_bias=True)
    y = conv(first, 64, use_bias=True)
    blocks = []
    for _ in range(16):
        maps = [y]
        for _ in range(8):
            maps = [jnp.concatenate([*maps, nn.relu(conv(_join(maps), 64, use_bias=True))], -1)]
        y = y + conv(_join(maps), 64, 1, use_bias=True)
        blocks.append(y)
    y = conv(conv(_join(blocks), 64, 1, use_bias=True), 64, use_bias=True) + first
    y = shuffle_pixels(conv(y, 256, use_bias=True))
    return conv(y, 3, use_bias=True)


def _join(maps: Sequence[Array]) -> Array:
    return jnp.concatenate(maps, -1) if len(maps) > 1 else maps[0]


def rcan(x: Array, classes: int) -> Array:
    """RCAN (Zhang et al. 2018b): ten groups of 20 gated blocks, for twice the size."""
    first = conv(x, 64, use_bias=True)
    y = first
    for _ in range(10):
        group = y
        for _ in range(20):
            z = conv(nn.relu(conv(y, 64, use_bias=True)), 64, use_bias=True)
            y = y + squeeze(z, 4)
        y = group + conv(y, 64, use_bias=True)
    y = first + conv(y, 64, use_bias=True)
    return conv(shuffle_pixels(conv(y, 256, use_bias=True)), 3, use_bias=True)


def deeplab_v3(x: Array, classes: int, stride: int) -> Array:
    """DeepLabV3 on ResNet-101, whose last map is 1 / `stride` (Chen et al. 2017)."""
    size = x.shape[1:3]
    y = conv(dropout(atrous_pyramid(resnet_multigrid(x, stride)[-1], stride), 0.3), classes, 1)
    return resize(y, size)


def deeplab_v3_plus(x: Array, classes: int, stride: int) -> Array:
    """DeepLabV3+ on ResNet-101: a decoder with the maps at 1/4 (Chen et al. 2018)."""
    size = x.shape[1:3]
    levels = resnet_multigrid(x, stride)
    low = conv_norm(levels[1], 48, 1)
    y = resize(atrous_pyramid(levels[-1], stride), low.shape[1:3])
    y = conv_norm(conv_norm(jnp.concatenate([y, low], -1), 256), 256)
    return resize(conv(y, classes, 1, use_bias=True), size)


def resnet_multigrid(x: Array, stride: int) -> list[Array]:
    """Return the maps of ResNet-101 with dilated last stages."""
    return resnet(x, 101, stride=stride)


def atrous_pyramid(x: Array, stride: int) -> Array:
    """Return convolutions of several dilations and the mean of the map, joined to 256 channels."""
    rates = [rate * 16 // stride for rate in (6, 12, 18)]
    maps = [conv_norm(x, 256, 1)]
    maps += [conv_norm(x, 256, 3, kernel_dilation=rate) for rate in rates]
    mean = conv_norm(x.mean((1, 2), keepdims=True), 256, 1)
    maps.append(jnp.broadcast_to(mean, maps[0].shape))
    return conv_norm(jnp.concatenate(maps, -1), 256, 1)


def pspnet(x: Array, classes: int) -> Array:
    """PSPNet on ResNet-50 (Zhao et al. 2017), with the loss of the third stage beside."""
    size = x.shape[1:3]
    levels = resnet(x, 50, stride=8)
    y = levels[-1]
    maps = [y]
    for bins in (1, 2, 3, 6):
        step = -(-y.shape[1] // bins)
        pooled = conv_norm(avg_pool(y, step, step), 512, 1)
        maps.append(resize(pooled, y.shape[1:3]))
    main = conv(dropout(conv_norm(jnp.concatenate(maps, -1), 512), 0.1), classes, 1)
    side = conv(dropout(conv_norm(levels[-2], 256), 0.1), classes, 1)
    return jnp.concatenate([resize(main, size), resize(side, size)], 1)


def densedepth(x: Array, classes: int) -> Array:
    """DenseDepth (Alhashim and Wonka 2018): DenseNet-169 and a decoder to half the size."""
    x = conv_norm(x, 64, 7, 2)
    skips = [x]
    x = max_pool(x, 3, 2)
    skips.append(x)
    for stage, blocks in enumerate((6, 12, 32, 32)):
        for _ in range(blocks):
            y = conv(nn.relu(norm(conv(nn.relu(norm(x)), 128, 1))), 32)
            x = jnp.concatenate([x, y], -1)
        if stage < 3:
            x = conv(nn.relu(norm(x)), x.shape[-1] // 2, 1)
            if stage < 2:
                skips.append(x)
            x = avg_pool(x)
    width = x.shape[-1]
    x = conv(x, width, 1, use_bias=True)
    for level, skip in enumerate(reversed(skips)):
        x = jnp.concatenate([resize(x, skip.shape[1:3]), skip], -1)
        for _ in range(2):
            x = nn.leaky_relu(conv(x, width // 2 ** (level + 1), use_bias=True), 0.2)
    return conv(x, 1, use_bias=True)


def dlinknet34(x: Array, classes: int) -> Array:
    """D-LinkNet-34 (Zhou et al. 2018): dilations of 1 to 8 between encoder and decoder."""
    levels = resnet(x, 34)
    y, total = levels[-1], levels[-1]
    for dilation in (1, 2, 4, 8):
        y = nn.relu(conv(y, 512, kernel_dilation=dilation, use_bias=True))
        total = total + y
    y = total
    for level in (levels[3], levels[2], levels[1], None):
        features = 64 if level is None else level.shape[-1]
        hidden = y.shape[-1] // 4
        y = nn.relu(norm(transposed(conv_norm(y, hidden, 1), hidden, 3)))
        y = conv_norm(y, features, 1)
        y = y if level is None else y + level
    y = nn.relu(transposed(y, 32, 4))
    return nn.sigmoid(conv(nn.relu(conv(y, 32, use_bias=True)), 1, use_bias=True))


def midas(x: Array, classes: int) -> Array:
    """MiDaS v2 (Ranftl et al. 2020): ResNeXt-101 32x8d and blocks that refine."""
    levels = resnet(x, 101, grouping=(32, 8))[1:]
    levels = [conv(level, 256) for level in levels]

    def refine(x: Array) -> Array:
        y = conv(nn.relu(x), 256, use_bias=True)
        return x + conv(nn.relu(y), 256, use_bias=True)

    y = levels[-1]
    for place in range(3, -1, -1):
        y = y if place == 3 else y + refine(levels[place])
        y = refine(y)
        y = resize(y, (2 * y.shape[1], 2 * y.shape[2]))
    y = conv(y, 128, use_bias=True)
    y = nn.relu(conv(resize(y, (2 * y.shape[1], 2 * y.shape[2])), 32, use_bias=True))
    return nn.relu(conv(y, 1, 1, use_bias=True))


def ocrnet(x: Array, classes: int) -> Array:
    """OCRNet on HRNet-W48 (Yuan et al. 2020): pixels attend to the classes' means."""
    size = x.shape[1:3]
    levels = hrnet(x, 48, resize)
    target = levels[0].shape[1:3]
    y = jnp.concatenate([levels[0], *(resize(level, target) for level in levels[1:])], -1)
    side = conv(conv_norm(y, 720, 1), classes, 1, use_bias=True)
    y = conv_norm(y, 512)
    batch = y.shape[0]
    pixels = y.reshape(batch, -1, 512)
    shares = nn.softmax(side.reshape(batch, -1, classes).swapaxes(1, 2))
    means = (shares @ pixels)[:, None]
    query = conv_norm(conv_norm(y, 256, 1), 256, 1).reshape(batch, -1, 256)
    key = conv_norm(conv_norm(means, 256, 1), 256, 1)[:, 0]
    value = conv_norm(means, 256, 1)[:, 0]
    context = nn.softmax(query @ key.swapaxes(1, 2) / 16) @ value
    context = conv_norm(context.reshape(*y.shape[:3], 256), 512, 1)
    y = dropout(conv_norm(jnp.concatenate([context, y], -1), 512, 1), 0.05)
    main = conv(y, classes, 1, use_bias=True)
    return jnp.concatenate([resize(main, size), resize(side, size)], 1)


def openpose(x: Array, classes: int) -> Array:
    """OpenPose (Cao et al. 2017): VGG-19's first layers and six stages of two branches."""
    x = vgg(x, ((64, 64), (128, 128), (256,) * 4, (512, 512, 256, 128)))[-1]
    joined, results = x, []
    for stage in range(6):
        branches = []
        for features in (38, 19):
            y = joined
            kernels = (3, 3, 3) if not stage else (7,) * 5
            for kernel in kernels:
                y = nn.relu(conv(y, 128, kernel, use_bias=True))
            y = nn.relu(conv(y, 128 if stage else 512, 1, use_bias=True))
            branches.append(conv(y, features, 1, use_bias=True))
        results += branches
        joined = jnp.concatenate([*branches, x], -1)
    return jnp.concatenate(results, -1)


def hed(x: Array, classes: int) -> Array:
    """HED (Xie and Tu 2015): an edge map of each stage of VGG-16, and their mixture."""
    size = x.shape[1:3]
    maps = [resize(conv(level, 1, 1, use_bias=True), size) for level in vgg(x, VGG16)]
    return nn.sigmoid(jnp.concatenate([*maps, conv(_join(maps), 1, 1, use_bias=True)], -1))


def simple_baseline(x: Array, classes: int) -> Array:
    """Simple Baselines (Xiao et al. 2018): ResNet-50 and three transposed convolutions."""
    x = resnet(x, 50)[-1]
    for _ in range(3):
        x = nn.relu(norm(transposed(x, 256, 4)))
    return conv(x, 17, 1, use_bias=True)


def fast_pose(x: Array, classes: int) -> Array:
    """AlphaPose's FastPose (Fang et al. 2017): SE-ResNet-50, pixels shuffled up three times."""

    def gate(x: Array) -> Array:
        return squeeze(x, x.shape[-1]) if x.shape[-1] >= 256 else x

    x = shuffle_pixels(_first_gated(x, gate))
    for features in (1024, 512):
        x = shuffle_pixels(conv_norm(x, features))
    return conv(x, 17, 3, use_bias=True)


def _first_gated(x: Array, gate: Any) -> Array:
    """Return the last map of ResNet-50 with a gate in the first block of each stage."""
    x = max_pool(conv_norm(x, 64, 7, 2), 3, 2)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            width = 64 * 2**stage
            stride = 2 if stage and not block else 1
            y = norm(conv(conv_norm(conv_norm(x, width, 1), width, 3, stride), 4 * width, 1))
            short = x if block else norm(conv(x, 4 * width, 1, stride))
            x = nn.relu(short + (y if block else gate(y)))
    return x


def pvnet(x: Array, classes: int) -> Array:
    """PVNet (Peng et al. 2019): ResNet-18 at 1/8 and a decoder to a vector for each keypoint."""
    size = x.shape[1:3]
    levels = resnet(x, 18, stride=8)
    y = conv_norm(levels[-1], 256)
    y = nn.leaky_relu(norm(conv(jnp.concatenate([y, levels[2]], -1), 128)), 0.1)
    for level, features in ((levels[1], 64), (levels[0], 32)):
        y = resize(y, level.shape[1:3]) if y.shape[1] != level.shape[1] else y
        y = nn.leaky_relu(norm(conv(jnp.concatenate([y, level], -1), features)), 0.1)
    y = jnp.concatenate([resize(y, size), x], -1)
    y = nn.leaky_relu(norm(conv(y, 32)), 0.1)
    return conv(y, 18 + 2, 1, use_bias=True)


def centerface(x: Array, classes: int) -> Array:
    """CenterFace (Xu et al. 2020): MobileNetV2, a pyramid of 24 channels, four heads."""
    levels = mobilenet_v2(x)[1:]
    y = conv_norm(levels[-1], 24, 1)
    for level in reversed(levels[:-1]):
        y = nn.relu(norm(transposed(y, 24, 2)))
        y = y + conv_norm(level, 24, 1)
    y = conv_norm(y, 24)
    return jnp.concatenate([conv(y, features, 1, use_bias=True) for features in (1, 2, 2, 10)], -1)


def u2net(x: Array, classes: int) -> Array:
    """U2-Net (Qin et al. 2020): a U of Us, with a map of each of its seven outputs."""
    size = x.shape[1:3]
    encoder = ((7, 32, 64), (6, 32, 128), (5, 64, 256), (4, 128, 512), (0, 256, 512))
    skips = []
    for depth, middle, features in encoder:
        x = _residual_u(x, depth, middle, features)
        skips.append(x)
        x = max_pool(x)
    x = _residual_u(x, 0, 256, 512)
    outputs = [x]
    decoder = ((0, 256, 512), (4, 128, 256), (5, 64, 128), (6, 32, 64), (7, 16, 64))
    for (depth, middle, features), skip in zip(decoder, reversed(skips), strict=True):
        joined = jnp.concatenate([resize(x, skip.shape[1:3]), skip], -1)
        x = _residual_u(joined, depth, middle, features)
        outputs.append(x)
    sides = [resize(conv(y, 1, use_bias=True), size) for y in outputs]
    joined = conv(jnp.concatenate(sides, -1), 1, 1, use_bias=True)
    return nn.sigmoid(jnp.concatenate([joined, *sides], -1))


def _residual_u(x: Array, depth: int, middle: int, features: int) -> Array:
    """Return a U of `depth` levels plus its input; depth 0: dilations instead of poolings."""
    options: Any = {"use_bias": True}
    x = conv_norm(x, features, **options)
    y = x
    maps = []
    dilated = not depth
    for level in range(depth or 4):
        last = level == (depth or 4) - 1
        dilation = 2**level if dilated else (2 if last else 1)
        if not dilated and 0 < level < depth - 1:
            y = max_pool(y)
        y = conv_norm(y, middle, kernel_dilation=dilation, **options)
        maps.append(y)
    for level in range(len(maps) - 2, -1, -1):
        y = y if y.shape[1] == maps[level].shape[1] else resize(y, maps[level].shape[1:3])
        width = middle if level else features
        dilation = 2**level if dilated else 1
        joined = jnp.concatenate([y, maps[level]], -1)
        y = conv_norm(joined, width, kernel_dilation=dilation, **options)
    return x + y
