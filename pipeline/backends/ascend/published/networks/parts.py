"""Parts of the networks of published steps: functions of maps (batch, height, width, channels).

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
    return jnp.repeat(jnp.repeat(x, factor, 1), factor, 2)


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
