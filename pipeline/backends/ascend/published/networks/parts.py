"""Parts and backbones of the networks of published steps: functions of maps.

Maps are (batch, height, width, channels). Backbones return theirs from the finest to the coarsest.

They make submodules of the `Net` whose body calls them. A body has the arithmetic of a network,
whose time is modelled. Nothing is trained, so batch normalisation always computes as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.models.modules.batch_norm import BatchNormModule

Activation = Callable[[Array], Array]
Body = Callable[..., Any]
"""A network: inputs -> outputs, in a `Net`."""
Norm = Callable[[Array], Array]
Resize = Callable[[Array, Sequence[int]], Array]
"""Function that returns maps of another size (height, width)."""
DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
DEPTHS[152] = (3, 8, 36, 3)
"""Blocks of each stage of a ResNet, by its depth."""
VGG16 = ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)
"""Features of the convolutions of each stage."""


class Net(nn.Module):
    """A network by its body, a function of the inputs."""

    body: Body

    @nn.compact
    def __call__(self, inputs: Array, train: bool) -> Any:
        """Return the body's outputs."""
        return self.body(inputs)


def keep(x: Array) -> Array:
    """Return x, as an activation or a norm that does nothing."""
    return x


def conv(x: Array, features: int, kernel: Any = 3, stride: Any = 1, **options: Any) -> Array:
    """Return a convolution with `same` padding and no bias; `options` are nn.Conv's.

    A number as `kernel`, `stride` or `kernel_dilation` holds for each spatial axis.
    """
    axes = x.ndim - 2
    size = (kernel,) * axes if isinstance(kernel, int) else kernel
    strides = (stride,) * axes if isinstance(stride, int) else stride
    options = {"use_bias": False, **options}
    result: Array = nn.Conv(features, size, strides, **options)(x)
    return result


def norm(x: Array) -> Array:
    """Return batch normalisation of the last axis."""
    result: Array = BatchNormModule(True, -1, 0.9, 1e-5, "float32", 1.0)(x)
    return result


def conv_norm(
    x: Array,
    features: int,
    kernel: Any = 3,
    stride: Any = 1,
    act: Activation = nn.relu,
    **options: Any,
) -> Array:
    """Return a convolution, batch normalisation and an activation."""
    return act(norm(conv(x, features, kernel, stride, **options)))


def depthwise(x: Array, kernel: int = 3, stride: int = 1, **options: Any) -> Array:
    """Return a convolution of each channel by itself."""
    return conv(x, x.shape[-1], kernel, stride, feature_group_count=x.shape[-1], **options)


def dense(x: Array, features: int, *, bias: bool = True) -> Array:
    """Return a product of the last axis."""
    result: Array = nn.Dense(features, use_bias=bias)(x)
    return result


def layer_norm(x: Array) -> Array:
    """Return layer normalisation of the last axis."""
    result: Array = nn.LayerNorm(epsilon=1e-6)(x)
    return result


def prelu(x: Array) -> Array:
    """Return a leaky ReLU whose slope is learned."""
    result: Array = nn.PReLU()(x)
    return result


def squeeze(x: Array, hidden: int, act: Activation = nn.relu, gate: Activation = nn.sigmoid) -> Any:
    """Return x times a gate for each channel, from the means of the channels."""
    axes = tuple(range(1, x.ndim - 1))
    means = x.mean(axes, keepdims=True)
    hidden_means = act(conv(means, hidden, 1, use_bias=True))
    return x * gate(conv(hidden_means, x.shape[-1], 1, use_bias=True))


def max_pool(x: Array, kernel: int = 2, stride: int = 2, padding: str = "SAME") -> Array:
    """Return the maxima of windows."""
    axes = x.ndim - 2
    result: Array = nn.max_pool(x, (kernel,) * axes, (stride,) * axes, padding)
    return result


def avg_pool(x: Array, kernel: int = 2, stride: int = 2) -> Array:
    """Return the means of windows."""
    axes = x.ndim - 2
    result: Array = nn.avg_pool(x, (kernel,) * axes, (stride,) * axes, "SAME")
    return result


def resize(x: Array, size: Sequence[int], *, method: str = "bilinear") -> Array:
    """Return maps of another size (height, width)."""
    return jax.image.resize(x, (x.shape[0], *size, x.shape[-1]), method)


def upsample(x: Array, factor: int = 2) -> Array:
    """Return maps whose pixels are repeated."""
    size = (x.shape[1] * factor, x.shape[2] * factor)
    return resize(x, size, method="nearest")


def transposed(x: Array, features: int, kernel: int, stride: int = 2, **options: Any) -> Array:
    """Return a transposed convolution, which multiplies the size by the stride."""
    axes = x.ndim - 2
    options = {"use_bias": False, **options}
    result: Array = nn.ConvTranspose(features, (kernel,) * axes, (stride,) * axes, **options)(x)
    return result


def shuffle_pixels(x: Array, factor: int = 2) -> Array:
    """Return maps `factor` times as large, whose pixels come from channels (Shi et al. 2016)."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height, width, factor, factor, channels // factor**2)
    return x.swapaxes(2, 3).reshape(batch, height * factor, width * factor, -1)


def attend(query: Array, key: Array, value: Array, heads: int, bias: Any = None) -> Array:
    """Return scaled dot-product attention of tokens (batch, tokens, features)."""

    def split(x: Array) -> Array:
        return x.reshape(*x.shape[:-1], heads, -1).swapaxes(-2, -3)

    query, key, value = map(split, (query, key, value))
    scores = query * query.shape[-1] ** -0.5 @ key.swapaxes(-1, -2)
    if bias is not None:
        scores = scores + bias
    joined = (jax.nn.softmax(scores) @ value).swapaxes(-2, -3)
    return joined.reshape(*joined.shape[:-2], -1)


def self_attention(x: Array, heads: int, bias: Any = None) -> Array:
    """Return self-attention with a product each for queries, keys, values and results."""
    query, key, value = (dense(x, x.shape[-1]) for _ in range(3))
    return dense(attend(query, key, value, heads, bias), x.shape[-1])


def gelu(x: Array) -> Array:
    """Return GELU by the error function."""
    return nn.gelu(x, approximate=False)


def feed_forward(x: Array, hidden: int, act: Activation = gelu) -> Array:
    """Return two products with an activation between."""
    return dense(act(dense(x, hidden)), x.shape[-1])


def transformer_block(x: Array, heads: int, ratio: float = 4, bias: Any = None) -> Array:
    """Return a block with layer norm before attention and before the products."""
    x = x + self_attention(layer_norm(x), heads, bias)
    return x + feed_forward(layer_norm(x), int(ratio * x.shape[-1]))


def dropout(x: Array, rate: float) -> Array:
    """Return x with a share of its numbers set to 0."""
    result: Array = nn.Dropout(rate, deterministic=False)(x)
    return result


def class_loss(logits: Array, labels: Array) -> Array:
    """Return the cross entropy of each sample, the mean over its positions."""
    one_hot = jax.nn.one_hot(labels, logits.shape[-1])
    losses = -(one_hot * jax.nn.log_softmax(logits)).sum(-1)
    return losses.mean(tuple(range(1, losses.ndim)))


def square_loss(outputs: Array, truth: Array) -> Array:
    """Return the mean squared error of each sample."""
    return ((outputs - truth) ** 2).mean(tuple(range(1, outputs.ndim)))


def absolute_loss(outputs: Array, truth: Array) -> Array:
    """Return the mean absolute error of each sample."""
    return jnp.abs(outputs - truth).mean(tuple(range(1, outputs.ndim)))


def flatten(maps: Sequence[Array], features: int) -> Array:
    """Return maps of several levels side by side: (batch, places, features)."""
    return jnp.concatenate([level.reshape(level.shape[0], -1, features) for level in maps], 1)


def head(x: Array, classes: int) -> Array:
    """Return logits of maps: means of the channels and a product."""
    return dense(x.mean((1, 2)), classes)


def resnet(
    x: Array,
    depth: int = 50,
    *,
    stride: int = 32,
    grouping: tuple[int, int] = (1, 64),
    after: Callable[[Array], Array] = keep,
    first_norm: Callable[[int], Norm] = lambda stage: norm,
) -> list[Array]:
    """Return the maps of a ResNet's stem and stages.

    The last stages are dilated instead of strided, so that the last map is 1 / `stride` of the
    images. `grouping` has the groups of a 3x3 convolution, and the features of each in the first
    stage. `after` is applied to a block's result before the input is added, `first_norm` makes the
    first norm of a stage's blocks.
    """
    x = conv_norm(x, 64, 7, 2)
    levels = [x]
    groups, group_width = grouping
    x = max_pool(x, 3, 2)
    for stage, blocks in enumerate(DEPTHS[depth]):
        shrinks = 4 * 2**stage <= stride
        dilation = 1 if shrinks else 4 * 2**stage // stride
        for block in range(blocks):
            step = 2 if stage and shrinks and not block else 1
            width = 64 * 2**stage
            if depth < 50:
                y = conv_norm(x, width, 3, step, kernel_dilation=dilation)
                y, out = norm(conv(y, width, 3, kernel_dilation=dilation)), width
            else:
                inner = width * group_width * groups // 64
                y = nn.relu(first_norm(stage)(conv(x, inner, 1)))
                y = conv_norm(
                    y, inner, 3, step, kernel_dilation=dilation, feature_group_count=groups
                )
                y, out = norm(conv(y, 4 * width, 1)), 4 * width
            if x.shape != y.shape:
                x = norm(conv(x, out, 1, step))
            x = nn.relu(x + after(y))
        levels.append(x)
    return levels


def vgg(x: Array, stages: Sequence[Sequence[int]], *, bias: bool = True) -> list[Array]:
    """Return the maps of VGG's stages, without norms, each before its pooling."""
    levels = []
    for stage in stages:
        for features in stage:
            x = nn.relu(conv(x, features, use_bias=bias))
        levels.append(x)
        x = max_pool(x)
    return levels


def relu6(x: Array) -> Array:
    """Return x between 0 and 6."""
    return jnp.clip(x, 0, 6)


def bottleneck(
    x: Array,
    features: int,
    kernel: int = 3,
    stride: int = 1,
    *,
    expansion: float = 6,
    act: Activation = relu6,
) -> Array:
    """Return an inverted bottleneck."""
    hidden = round(x.shape[-1] * expansion)
    y = conv_norm(x, hidden, 1, 1, act) if expansion != 1 else x
    y = act(norm(depthwise(y, kernel, stride)))
    y = norm(conv(y, features, 1))
    return x + y if x.shape == y.shape else y


def mobilenet_v2(x: Array) -> list[Array]:
    """Return the maps of MobileNetV2 at 1/2, 1/4, 1/8, 1/16 and 1/32 of the images."""
    x = conv_norm(x, 32, 3, 2, relu6)
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1))
    levels = []
    for expansion, features, blocks, stride in (*rows, (6, 160, 3, 2), (6, 320, 1, 1)):
        for block in range(blocks):
            if stride == 2 and not block:
                levels.append(x)
            x = bottleneck(x, features, 3, stride if not block else 1, expansion=expansion)
    return [*levels, x]


def darknet53(x: Array, act: Activation) -> list[Array]:
    """Return the maps of Darknet-53's stages (Redmon and Farhadi 2018)."""
    x = conv_norm(x, 32, act=act)
    levels = []
    for stage, blocks in enumerate((1, 2, 8, 8, 4)):
        x = conv_norm(x, 64 * 2**stage, 3, 2, act)
        for _ in range(blocks):
            x = x + conv_norm(conv_norm(x, x.shape[-1] // 2, 1, act=act), x.shape[-1], act=act)
        levels.append(x)
    return levels


def csp_stage(x: Array, features: int, blocks: int, act: Activation, *, adds: bool = True) -> Array:
    """Return a cross-stage-partial stage: two halves, blocks in one of them (Wang et al. 2020)."""
    half = features // 2
    y = conv_norm(x, half, 1, act=act)
    for _ in range(blocks):
        z = conv_norm(conv_norm(y, half, 1, act=act), half, act=act)
        y = y + z if adds else z
    y = jnp.concatenate([y, conv_norm(x, half, 1, act=act)], -1)
    return conv_norm(y, features, 1, act=act)


def hrnet(x: Array, width: int, fuse: Resize) -> list[Array]:
    """Return the four maps of HRNet (Wang et al. 2020); `fuse` enlarges a map to another's size."""
    x = conv_norm(conv_norm(x, 64, 3, 2), 64, 3, 2)
    for block in range(4):
        y = norm(conv(conv_norm(conv_norm(x, 64, 1), 64), 256, 1))
        x = nn.relu(y + (x if block else norm(conv(x, 256, 1))))
    levels = [conv_norm(x, width), conv_norm(x, 2 * width, 3, 2)]
    for stage, modules in ((2, 1), (3, 4), (4, 3)):
        if len(levels) < stage:
            levels.append(conv_norm(levels[-1], width * 2 ** (stage - 1), 3, 2))
        for _ in range(modules):
            levels = [_basic_blocks(level, 4) for level in levels]
            levels = [_fuse_levels(levels, place, fuse) for place in range(stage)]
    return levels


def _basic_blocks(x: Array, count: int) -> Array:
    for _ in range(count):
        x = nn.relu(x + norm(conv(conv_norm(x, x.shape[-1]), x.shape[-1])))
    return x


def _fuse_levels(levels: Sequence[Array], place: int, fuse: Resize) -> Array:
    target = levels[place]
    total = target
    for other, level in enumerate(levels):
        y = level
        if other > place:
            y = fuse(norm(conv(y, target.shape[-1], 1)), target.shape[1:3])
        for step in range(other, place):
            last = step == place - 1
            y = conv_norm(
                y, target.shape[-1] if last else y.shape[-1], 3, 2, keep if last else nn.relu
            )
        total = total + y if other != place else total
    return nn.relu(total)


def pyramid(
    levels: Sequence[Array], features: int, merge: Resize, *, bias: bool = True
) -> list[Array]:
    """Return a feature pyramid of maps, from the finest (Lin et al. 2017)."""
    above = None
    results = []
    for level in reversed(levels):
        lateral = conv(level, features, 1, use_bias=bias)
        if above is not None:
            lateral = lateral + merge(above, lateral.shape[1:3])
        above = lateral
        results.append(conv(lateral, features, use_bias=bias))
    return results[::-1]
