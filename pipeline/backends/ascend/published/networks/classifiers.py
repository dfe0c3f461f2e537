"""Classifiers of images whose steps were published: bodies, images -> logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.backends.ascend.published.networks.parts import (
    avg_pool,
    bottleneck,
    conv,
    conv_norm,
    dense,
    depthwise,
    dropout,
    gelu,
    head,
    hrnet,
    keep,
    max_pool,
    norm,
    resize,
    resnet,
    squeeze,
    upsample,
)


def resnet50(x: Array, classes: int, *, stem: str = "c", pools: bool = False) -> Array:
    """ResNet-50 v1c, whose stem has three convolutions; `pools`: v1d, whose shortcuts pool."""
    x = conv_norm(conv_norm(conv_norm(x, 32, 3, 2), 32), 64)
    x = max_pool(x, 3, 2)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            width = 64 * 2**stage
            y = conv_norm(conv_norm(x, width, 1), width, 3, stride)
            y = norm(conv(y, 4 * width, 1))
            if not block:
                short = avg_pool(x) if pools and stride == 2 else x
                x = norm(conv(short, 4 * width, 1, 1 if pools else stride))
            x = nn.relu(x + y)
    return head(x, classes)


def mish(x: Array) -> Array:
    """x tanh(softplus(x)) (Misra 2019)."""
    return x * jnp.tanh(nn.softplus(x))


def cspdarknet53(x: Array, classes: int) -> Array:
    """CSPDarknet-53 (Wang et al. 2020)."""
    return head(cspdarknet_stages(x)[-1], classes)


def cspdarknet_stages(x: Array) -> list[Array]:
    """Return the maps of CSPDarknet-53's stages."""
    x = conv_norm(x, 32, act=mish)
    levels = []
    for stage, blocks in enumerate((1, 2, 8, 8, 4)):
        features = 64 * 2**stage
        x = conv_norm(x, features, 3, 2, mish)
        half = features if not stage else features // 2
        y = conv_norm(x, half, 1, act=mish)
        for _ in range(blocks):
            z = conv_norm(y, half // 2 if not stage else half, 1, act=mish)
            y = y + conv_norm(z, half, act=mish)
        y = conv_norm(y, half, 1, act=mish)
        y = jnp.concatenate([y, conv_norm(x, half, 1, act=mish)], -1)
        x = conv_norm(y, features, 1, act=mish)
        levels.append(x)
    return levels


def bam(x: Array) -> Array:
    """Return x gated by its channels' means and by dilated convolutions (Park et al. 2018)."""
    hidden = x.shape[-1] // 16
    means = nn.relu(norm(dense(x.mean((1, 2)), hidden)))
    channel = norm(dense(means, x.shape[-1]))[:, None, None]
    y = conv_norm(x, hidden, 1, use_bias=True)
    for _ in range(2):
        y = conv_norm(y, hidden, 3, kernel_dilation=4, use_bias=True)
    return x * (1 + nn.sigmoid(channel + norm(conv(y, 1, 1, use_bias=True))))


def resnet50_bam(x: Array, classes: int) -> Array:
    """ResNet-50 with BAM after three stages."""
    x = max_pool(conv_norm(x, 64, 7, 2), 3, 2)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        x = bottlenecks(x, 64 * 2**stage, blocks, 2 if stage else 1)
        x = bam(x) if stage < 3 else x
    return head(x, classes)


def bottlenecks(x: Array, width: int, blocks: int, stride: int) -> Array:
    """Return a stage of a ResNet of 50 layers or more."""
    for block in range(blocks):
        y = conv_norm(conv_norm(x, width, 1), width, 3, 1 if block else stride)
        y = norm(conv(y, 4 * width, 1))
        short = x if block else norm(conv(x, 4 * width, 1, stride))
        x = nn.relu(short + y)
    return x


def reason_globally(x: Array, nodes: int = 256) -> Array:
    """Return x plus products over a graph of nodes onto which x is projected (Chen et al. 2019)."""
    batch, height, width, features = x.shape
    states = conv(x, 2 * nodes, 1, use_bias=True).reshape(batch, -1, 2 * nodes)
    places = conv(x, nodes, 1, use_bias=True).reshape(batch, -1, nodes)
    graph = places.swapaxes(1, 2) @ states / (height * width)
    graph = graph + dense(graph.swapaxes(1, 2), nodes).swapaxes(1, 2)
    graph = dense(nn.relu(graph), 2 * nodes, bias=False)
    spread = (places @ graph).reshape(batch, height, width, 2 * nodes)
    return x + norm(conv(spread, features, 1))


def glore_resnet50(x: Array, classes: int) -> Array:
    """ResNet-50 with three units of global reasoning after the third stage."""
    x = max_pool(conv_norm(x, 64, 7, 2), 3, 2)
    x = bottlenecks(bottlenecks(x, 64, 3, 1), 128, 4, 2)
    x = bottlenecks(x, 256, 6, 2)
    for _ in range(3):
        x = reason_globally(x)
    return head(bottlenecks(x, 512, 3, 2), classes)


def _pre_bottleneck(x: Array, features: int, stride: int = 1) -> Array:
    """Return a residual block whose norms come first."""
    y = nn.relu(norm(x))
    short = conv(y, features, 1, stride) if x.shape[-1] != features or stride > 1 else x
    y = conv(y, features // 4, 1)
    y = conv(nn.relu(norm(y)), features // 4, 3, stride)
    return short + conv(nn.relu(norm(y)), features, 1)


def _attention_module(x: Array, features: int, depth: int) -> Array:
    """Return the trunk times one plus a mask from an hourglass of `depth` poolings."""
    x = _pre_bottleneck(x, features)
    trunk = _pre_bottleneck(_pre_bottleneck(x, features), features)
    sizes, skips, mask = [], [], x
    for level in range(depth):
        sizes.append(mask.shape[1:3])
        mask = _pre_bottleneck(max_pool(mask, 3, 2), features)
        if level < depth - 1:
            skips.append(_pre_bottleneck(mask, features))
    for level in reversed(range(depth)):
        mask = _pre_bottleneck(mask, features)
        mask = resize(mask, sizes[level])
        mask = mask + (skips[level - 1] if level else trunk)
    mask = conv(nn.relu(norm(mask)), features, 1)
    mask = nn.sigmoid(conv(nn.relu(norm(mask)), features, 1))
    return _pre_bottleneck((1 + mask) * trunk, features)


def residual_attention_net(x: Array, classes: int) -> Array:
    """Residual Attention Network-92 (Wang et al. 2017)."""
    small = x.shape[1] < 64
    x = conv_norm(x, 32 if small else 64, 3 if small else 7, 1 if small else 2)
    x = x if small else max_pool(x, 3, 2)
    depths = (2, 1, 0) if small else (3, 2, 1)
    for stage, (modules, depth) in enumerate(zip((1, 2, 3), depths, strict=True)):
        features = (128 if small else 256) * 2**stage
        x = _pre_bottleneck(x, features, 2 if stage else 1)
        for _ in range(modules):
            x = _attention_module(x, features, depth)
    last = 1024 if small else 2048
    for block in range(3):
        x = _pre_bottleneck(x, last, 2 if not block and not small else 1)
    return head(nn.relu(norm(x)), classes)


def convmixer(x: Array, classes: int) -> Array:
    """ConvMixer-1536/20 with kernels of 9 and patches of 7 (Trockman and Kolter 2022)."""
    x = norm(gelu(conv(x, 1536, 7, 7, use_bias=True)))
    for _ in range(20):
        x = x + norm(gelu(depthwise(x, 9, use_bias=True)))
        x = norm(gelu(conv(x, 1536, 1, use_bias=True)))
    return head(x, classes)


def ghostnet(x: Array, classes: int) -> Array:
    """GhostNet 1.0 (Han et al. 2020)."""

    def ghost(x: Array, features: int, act: Any) -> Array:
        half = features // 2
        primary = conv_norm(x, half, 1, act=act)
        return jnp.concatenate([primary, act(norm(depthwise(primary)))], -1)

    x = conv_norm(x, 16, 3, 2)
    rows = "3,16,16,0,1 3,48,24,0,2 3,72,24,0,1 5,72,40,1,2 5,120,40,1,1 3,240,80,0,2 3,200,80,0,1"
    rows += " 3,184,80,0,1 3,184,80,0,1 3,480,112,1,1 3,672,112,1,1 5,672,160,1,2 5,960,160,0,1"
    rows += " 5,960,160,1,1 5,960,160,0,1 5,960,160,1,1"
    for row in rows.split():
        kernel, hidden, features, squeezes, stride = map(int, row.split(","))
        y = ghost(x, hidden, nn.relu)
        y = norm(depthwise(y, kernel, 2)) if stride == 2 else y
        if squeezes:
            y = squeeze(y, -(-hidden // 4 // 4) * 4, gate=nn.hard_sigmoid)
        y = ghost(y, features, keep)
        if x.shape != y.shape:
            x = norm(conv(norm(depthwise(x, kernel, stride)), features, 1))
        x = x + y
    x = conv_norm(x, 960, 1)
    y = nn.relu(conv(x.mean((1, 2), keepdims=True), 1280, 1, use_bias=True))
    return dense(dropout(y[:, 0, 0], 0.2), classes)


def hrnet_w18(x: Array, classes: int) -> Array:
    """HRNet-W18 with the classifier's head (Wang et al. 2020)."""

    def fuse(x: Array, size: Sequence[int]) -> Array:
        return upsample(x, size[0] // x.shape[1])

    levels = hrnet(x, 18, fuse)
    y = bottlenecks(levels[0], 32, 1, 1)
    for level, width in zip(levels[1:], (64, 128, 256), strict=True):
        level = bottlenecks(level, width, 1, 1)
        y = level + conv_norm(y, 4 * width, 3, 2, use_bias=True)
    return head(conv_norm(y, 2048, 1, use_bias=True), classes)


def inception_resnet_v2(x: Array, classes: int) -> Array:
    """Inception-ResNet v2 (Szegedy et al. 2017)."""
    valid: Any = {"padding": "VALID"}
    x = conv_norm(conv_norm(conv_norm(x, 32, 3, 2, **valid), 32, **valid), 64)
    x = max_pool(x, 3, 2, "VALID")
    x = max_pool(conv_norm(conv_norm(x, 80, 1), 192, **valid), 3, 2, "VALID")
    parts = [conv_norm(x, 96, 1), conv_norm(conv_norm(x, 48, 1), 64, 5)]
    parts.append(conv_norm(conv_norm(conv_norm(x, 64, 1), 96), 96))
    x = jnp.concatenate([*parts, conv_norm(nn.avg_pool(x, (3, 3), padding="SAME"), 64, 1)], -1)
    for _ in range(10):
        branches = ((32, 1),), ((32, 1), (32, 3)), ((32, 1), (48, 3), (64, 3))
        x = _inception_residual(x, branches)
    x = _reduce_maps(x, ((384, 3),), ((256, 1), (256, 3), (384, 3)))
    for _ in range(20):
        x = _inception_residual(x, (((192, 1),), ((128, 1), (160, (1, 7)), (192, (7, 1)))))
    x = _reduce_maps(x, ((256, 1), (384, 3)), ((256, 1), (288, 3)), ((256, 1), (288, 3), (320, 3)))
    for _ in range(10):
        x = _inception_residual(x, (((192, 1),), ((192, 1), (224, (1, 3)), (256, (3, 1)))))
    return head(conv_norm(x, 1536, 1), classes)


def facenet(x: Array, classes: int) -> Array:
    """Inception-ResNet v1 of FaceNet's PyTorch package, with an embedding of 512."""
    valid: Any = {"padding": "VALID"}
    x = conv_norm(conv_norm(conv_norm(x, 32, 3, 2, **valid), 32, **valid), 64)
    x = conv_norm(conv_norm(max_pool(x, 3, 2, "VALID"), 80, 1), 192, **valid)
    x = conv_norm(x, 256, 3, 2, **valid)
    for _ in range(5):
        x = _inception_residual(x, (((32, 1),), ((32, 1), (32, 3)), ((32, 1), (32, 3), (32, 3))))
    x = _reduce_maps(x, ((384, 3),), ((192, 1), (192, 3), (256, 3)))
    for _ in range(10):
        x = _inception_residual(x, (((128, 1),), ((128, 1), (128, (1, 7)), (128, (7, 1)))))
    x = _reduce_maps(x, ((256, 1), (384, 3)), ((256, 1), (256, 3)), ((256, 1), (256, 3), (256, 3)))
    for _ in range(6):
        x = _inception_residual(x, (((192, 1),), ((192, 1), (192, (1, 3)), (192, (3, 1)))))
    return dense(norm(dense(x.mean((1, 2)), 512, bias=False)), classes)


Branch = Sequence[tuple[int, Any]]


def _branch(x: Array, layers: Branch) -> Array:
    for features, kernel in layers:
        x = conv_norm(x, features, kernel)
    return x


def _inception_residual(x: Array, branches: Sequence[Branch]) -> Array:
    y = jnp.concatenate([_branch(x, layers) for layers in branches], -1)
    return nn.relu(x + 0.2 * conv(y, x.shape[-1], 1, use_bias=True))


def _reduce_maps(x: Array, *branches: Branch) -> Array:
    """Return branches whose last convolutions shrink the maps, beside their maxima."""
    parts = [
        conv_norm(_branch(x, layers[:-1]), layers[-1][0], layers[-1][1], 2, padding="VALID")
        for layers in branches
    ]
    return jnp.concatenate([*parts, max_pool(x, 3, 2, "VALID")], -1)


def tresnet_m(x: Array, classes: int) -> Array:
    """TResNet-M (Ridnik et al. 2021): basic blocks, then bottlenecks, blurred before striding."""

    def leaky(x: Array) -> Array:
        return nn.leaky_relu(x, 1e-3)

    def blur(x: Array) -> Array:
        return depthwise(x, 3, 2)

    batch, height, width, _ = x.shape
    x = x.reshape(batch, height // 4, 4, width // 4, 4, 3).transpose(0, 1, 3, 2, 4, 5)
    x = conv_norm(x.reshape(batch, height // 4, width // 4, 48), 64, 3, act=leaky)
    for stage, (blocks, width) in enumerate(zip((3, 4, 11, 3), (64, 128, 256, 512), strict=True)):
        for block in range(blocks):
            shrinks = bool(stage) and not block
            if stage < 2:
                y = conv_norm(x, width, act=leaky)
                y = blur(y) if shrinks else y
                y, out = norm(conv(y, width)), width
                y = squeeze(y, max(64, width // 4))
            else:
                y = conv_norm(conv_norm(x, width, 1, act=leaky), width, act=leaky)
                y = blur(y) if shrinks else y
                y = squeeze(y, max(64, width * 4 // 8)) if stage == 2 else y
                y, out = norm(conv(y, 4 * width, 1)), 4 * width
            if x.shape != y.shape:
                x = norm(conv(avg_pool(x) if shrinks else x, out, 1))
            x = nn.relu(x + y)
    return head(x, classes)


def bit_resnet50(x: Array, classes: int) -> Array:
    """BiT's ResNet-50 v2: group norm and standardised weights (Kolesnikov et al. 2020)."""

    def group_norm(x: Array) -> Array:
        return nn.relu(nn.GroupNorm(32)(x))

    def standard(x: Array, features: int, kernel: int, stride: int = 1) -> Array:
        result: Array = nn.WeightNorm(
            nn.Conv(features, (kernel,) * 2, (stride,) * 2, use_bias=False)
        )(x)
        return result

    x = max_pool(standard(x, 64, 7, 2), 3, 2)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            width = 64 * 2**stage
            stride = 2 if stage and not block else 1
            y = group_norm(x)
            short = x if block else standard(y, 4 * width, 1, stride)
            y = group_norm(standard(y, width, 1))
            y = group_norm(standard(y, width, 3, stride))
            x = short + standard(y, 4 * width, 1)
    return head(group_norm(x), classes)


def ibn_resnet50(x: Array, classes: int) -> Array:
    """IBN-Net-a: the first norms of three stages are half instance norm (Pan et al. 2018)."""

    def mixed(x: Array) -> Array:
        half = x.shape[-1] // 2
        by_instance = nn.GroupNorm(None, group_size=1)(x[..., :half])
        return jnp.concatenate([by_instance, norm(x[..., half:])], -1)

    levels = resnet(x, 50, first_norm=lambda stage: mixed if stage < 3 else norm)
    return head(levels[-1], classes)


def inverted(
    rows: str, stem: int, first: int, last: int, act: Callable[[Array], Array] = nn.relu
) -> Callable[[Array, int], Array]:
    """Return a network of inverted bottlenecks.

    A row is kernel, expansion, features, blocks, stride.
    """

    def body(x: Array, classes: int) -> Array:
        x = conv_norm(x, stem, 3, 2, act)
        x = norm(conv(act(norm(depthwise(x))), first, 1))
        for row in rows.split():
            kernel, expansion, features, blocks, stride = map(int, row.split(","))
            for block in range(blocks):
                step = 1 if block else stride
                x = bottleneck(x, features, kernel, step, expansion=expansion, act=act)
        return head(conv_norm(x, last, 1, act=act), classes)

    return body


MNASNET = "3,3,24,3,2 5,3,40,3,2 5,6,80,3,2 3,6,96,2,1 5,6,192,4,2 3,6,320,1,1"
SPNASNET = (
    "3,3,24,3,2 5,6,40,1,2 3,3,40,3,1 5,6,80,1,2 3,3,80,3,1 5,6,96,1,1 5,3,96,3,1 5,6,192,4,2 "
    "3,6,320,1,1"
)


def _squeezed_bottleneck(x: Array, features: int, stride: int, expansion: int) -> Array:
    """Return an inverted bottleneck with a gate of a quarter of the input's width."""
    y = conv_norm(x, x.shape[-1] * expansion, 1, 1, nn.silu)
    y = nn.silu(norm(depthwise(y, 3, stride)))
    y = squeeze(y, round(x.shape[-1] / 4), nn.silu)
    y = norm(conv(y, features, 1))
    return x + y if x.shape == y.shape else y


def _fused_bottleneck(x: Array, features: int, stride: int, expansion: int) -> Array:
    """Return an inverted bottleneck with a 3x3 convolution in place of a 1x1 and a depthwise one.

    Without an expansion the 3x3 convolution is the only one.
    """
    if expansion == 1:
        y = conv_norm(x, features, 3, stride, nn.silu)
    else:
        y = conv_norm(x, x.shape[-1] * expansion, 3, stride, nn.silu)
        y = norm(conv(y, features, 1))
    return x + y if x.shape == y.shape else y


def efficientnet_v2_s(x: Array, classes: int) -> Array:
    """EfficientNetV2-S (Tan and Le 2021)."""
    x = conv_norm(x, 24, 3, 2, nn.silu)
    rows = "1,24,2,1,1 4,48,4,2,1 4,64,4,2,1 4,128,6,2,0 6,160,9,1,0 6,256,15,2,0"
    for row in rows.split():
        expansion, features, blocks, stride, fused = map(int, row.split(","))
        make_block = _fused_bottleneck if fused else _squeezed_bottleneck
        for block in range(blocks):
            x = make_block(x, features, 1 if block else stride, expansion)
    return head(conv_norm(x, 1280, 1, act=nn.silu), classes)


def shufflenet_v2_plus(x: Array, classes: int) -> Array:
    """ShuffleNetV2+ small: kernels of the searched architecture, gates and hard swish."""
    kinds = (0, 0, 3, 1, 1, 1, 0, 0, 2, 0, 2, 1, 1, 0, 2, 0, 2, 1, 3, 2)
    x = conv_norm(x, 16, 3, 2, nn.hard_swish)
    place = 0
    for stage, (blocks, features) in enumerate(zip((4, 4, 8, 4), (36, 104, 208, 416), strict=True)):
        act = nn.hard_swish if stage else nn.relu
        for block in range(blocks):
            kind = kinds[place]
            place += 1
            kernel = (3, 5, 7, 3)[kind]
            stride = 1 if block else 2
            short, y = (x, x) if not block else (x[..., ::2], x[..., 1::2])
            width = features // 2
            if kind == 3:
                for index in range(3):
                    y = norm(depthwise(y, 3, stride if not index else 1))
                    y = conv_norm(y, width, 1, act=act)
            else:
                y = norm(depthwise(conv_norm(y, width, 1, act=act), kernel, stride))
                y = conv_norm(y, features - short.shape[-1] if block else width, 1, act=act)
            if stage > 1:
                y = squeeze(y, max(1, y.shape[-1] // 4), gate=nn.hard_sigmoid)
            if not block:
                short = conv_norm(norm(depthwise(short, kernel, 2)), short.shape[-1], 1, act=act)
            x = jnp.concatenate([short, y], -1)
    x = conv_norm(x, 1280, 1, act=nn.hard_swish).mean((1, 2), keepdims=True)
    x = squeeze(x, 320, gate=nn.hard_sigmoid)[:, 0, 0]
    x = dropout(nn.hard_swish(dense(x, 1280, bias=False)), 0.2)
    return dense(x, classes, bias=False)
