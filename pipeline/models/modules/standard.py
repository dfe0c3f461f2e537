"""The computations of the standard layers, and activations by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import pair
from pipeline.models.lowerings.formulas.pools import average_windows, compute_wide, max_windows
from pipeline.models.lowerings.lowered_layers import pool_max
from pipeline.models.lowerings.problem import Pair, swap_layout
from pipeline.models.modules.apply_layers import (
    LayerContext,
    channel_axis,
    computes,
    require_groups,
    require_images,
    require_number,
    to_nhwc,
)
from pipeline.models.modules.batch_norm import BatchNormModule
from pipeline.models.modules.convolution import DenseModule, find_pads

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": jax.nn.gelu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "swish": jax.nn.swish,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_swish": jax.nn.hard_swish,
}
EXACT = ("relu", "relu6")
"""Activations whose results need no rounding in any type."""


def activate(name: str, x: Array) -> Array:
    """Apply an activation to each value; the result has the type of x.

    For bfloat16 and float16 the activation and its derivative are computed in float32 and rounded
    once, since on a CPU the rounding of an operation takes longer than the operation. The
    derivative is stored for the backward pass, so forward mode isn't supported in these types.
    """
    if name in EXACT or x.dtype.itemsize >= 4:
        return ACTIVATIONS[name](x)
    return _round_once(name, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _round_once(name: str, x: Array) -> Array:
    return ACTIVATIONS[name](x.astype(jnp.float32)).astype(x.dtype)


def _forward(name: str, x: Array) -> tuple[Array, Array]:
    wide = x.astype(jnp.float32)
    y, derivative = jax.jvp(ACTIVATIONS[name], (wide,), (jnp.ones_like(wide),))
    return y.astype(x.dtype), derivative.astype(x.dtype)


def _backward(name: str, derivative: Array, cotangent: Array) -> tuple[Array]:
    return (cotangent * derivative,)


_round_once.defvjp(_forward, _backward)


@computes(standard.Dense)
def _compute_dense(layer: standard.Dense, x: Array, context: LayerContext) -> Array:
    if x.ndim not in (2, 3):
        raise ValueError(
            f"{context}: shape {x.shape} reaches the layer; must be (batch, features): "
            "put flatten or global_avg_pool before it"
        )
    return DenseModule(
        require_number(layer.features, context),
        use_bias=layer.bias,
        dtype=context.dtype,
        kernel_init=(layer.kernel_init or context.initializers.dense).build(),
        bias_init=(layer.bias_init or context.initializers.bias).build(),
        policy=context.policy,
        products=context.products,
        name=context.name,
    )(x)


@computes(standard.BatchNorm)
def _compute_batch_norm(layer: standard.BatchNorm, x: Array, context: LayerContext) -> Array:
    return BatchNormModule(
        train=context.trains_statistics,
        axis=channel_axis(x, context.layout),
        momentum=layer.momentum,
        epsilon=layer.epsilon,
        dtype=context.dtype,
        scale_init=layer.scale_init,
        batch_axis=context.batch_axis,
        name=context.name,
    )(x)


@computes(standard.Dropout)
def _compute_dropout(layer: standard.Dropout, x: Array, context: LayerContext) -> Array:
    shared_axes = range(1, x.ndim) if layer.per_sample else ()
    dropout = nn.Dropout(
        layer.rate, shared_axes, deterministic=not context.train, name=context.name
    )
    if channel_axis(x, context.layout) == 0:
        # The mask is drawn in NHWC, so that the same values are dropped in both layouts.
        return swap_layout(dropout(to_nhwc(x, context.layout)))
    return dropout(x)


@computes(standard.Activation)
def _compute_activation(layer: standard.Activation, x: Array, context: LayerContext) -> Array:
    if layer.name not in ACTIVATIONS:
        return layer.compute(x, context)  # Raises, since the class has no such method.
    with jax.named_scope(context.name):
        return activate(layer.name, x)


@computes(standard.LeakyRelu)
def _compute_leaky_relu(layer: standard.LeakyRelu, x: Array, context: LayerContext) -> Array:
    with jax.named_scope(context.name):
        return jnp.where(x >= 0, x, x * jnp.asarray(layer.slope, x.dtype))


@computes(standard.MaxPool)
def _compute_max_pool(layer: standard.MaxPool, x: Array, context: LayerContext) -> Array:
    window, strides, pads = _find_windows(layer, x, context)
    with jax.named_scope(context.name):
        return pool_max(x, window, strides, pads, context.policy)


def average_pool(
    x: Array, window: Sequence[int], strides: Sequence[int], pads: Sequence[Pair]
) -> Array:
    """Return the mean of every window of x (batch, ..., channels), without padding, in x's type."""

    def compute(x: Array) -> Array:
        return nn.avg_pool(x, window, strides, pads, count_include_pad=False)

    return compute_wide(compute, x)


@computes(standard.AvgPool)
def _compute_avg_pool(layer: standard.AvgPool, x: Array, context: LayerContext) -> Array:
    window, strides, pads = _find_windows(layer, x, context)
    with jax.named_scope(context.name):
        return average_pool(x, window, strides, pads)


@computes(standard.GlobalAvgPool)
def _compute_global_avg_pool(
    layer: standard.GlobalAvgPool, x: Array, context: LayerContext
) -> Array:
    require_images(x, context)
    with jax.named_scope(context.name):
        mean = x.mean((1, 2))
        return mean if context.layout == "nhwc" else mean.T


@computes(standard.AdaptiveAvgPool)
def _compute_adaptive_avg_pool(
    layer: standard.AdaptiveAvgPool, x: Array, context: LayerContext
) -> Array:
    return _reduce_windows(average_windows, layer, x, context)


@computes(standard.AdaptiveMaxPool)
def _compute_adaptive_max_pool(
    layer: standard.AdaptiveMaxPool, x: Array, context: LayerContext
) -> Array:
    return _reduce_windows(max_windows, layer, x, context)


def _reduce_windows(
    reduce: Callable[[Array, int, int], Array],
    layer: standard.AdaptivePool,
    x: Array,
    context: LayerContext,
) -> Array:
    require_images(x, context)
    with jax.named_scope(context.name):
        for axis, count in zip((1, 2), pair(layer.size), strict=True):
            x = reduce(x, axis, count)
        return x


@computes(standard.Upsample)
def _compute_upsample(layer: standard.Upsample, x: Array, context: LayerContext) -> Array:
    require_images(x, context)
    batch, height, width, channels = x.shape
    shape = (batch, height, layer.factor, width, layer.factor, channels)
    with jax.named_scope(context.name):
        repeated = jnp.broadcast_to(x[:, :, None, :, None], shape)
        return repeated.reshape(batch, height * layer.factor, width * layer.factor, channels)


@computes(standard.ChannelShuffle)
def _compute_channel_shuffle(
    layer: standard.ChannelShuffle, x: Array, context: LayerContext
) -> Array:
    require_groups(x, layer.groups, context)
    with jax.named_scope(context.name):
        grouped = x.reshape(*x.shape[:-1], layer.groups, x.shape[-1] // layer.groups)
        return grouped.swapaxes(-1, -2).reshape(x.shape)


@computes(standard.Flatten)
def _compute_flatten(layer: standard.Flatten, x: Array, context: LayerContext) -> Array:
    x = to_nhwc(x, context.layout)
    return x.reshape(x.shape[0], prod(x.shape[1:]))


@computes(standard.Reshape)
def _compute_reshape(layer: standard.Reshape, x: Array, context: LayerContext) -> Array:
    if prod(x.shape[1:]) != prod(layer.shape):
        raise ValueError(
            f"{context}: shape {x.shape} reaches the layer, {prod(x.shape[1:]):,} values a sample; "
            f"shape {list(layer.shape)} must have as many"
        )
    return x.reshape(x.shape[0], *layer.shape)


def _find_windows(
    layer: standard.Pool, x: Array, context: LayerContext
) -> tuple[Pair, Pair, tuple[Pair, Pair]]:
    """Return window, strides and pads."""
    require_images(x, context)
    window = pair(layer.kernel)
    strides = window if layer.stride is None else pair(layer.stride)
    rows, columns = find_pads(x, window, strides, layer.padding, context)
    return window, strides, (rows, columns)
