"""From layers to computation: the flax module that walks a list of layers."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

from pipeline.lowerings.conv2d import conv2d
from pipeline.lowerings.conv2d_chwn import conv2d_chwn
from pipeline.lowerings.dense import dense_product
from pipeline.lowerings.max_pool import pool_max
from pipeline.lowerings.problem.conv_window import Pair
from pipeline.lowerings.problem.image_layout import Layout
from pipeline.lowerings.problem.lowering import DEFAULTS, LoweringPolicy
from pipeline.models.layers import standard
from pipeline.models.layers.fields import pair
from pipeline.models.layers.model_spec import InitSpec, LayerSpec
from pipeline.models.layers.padding import pads_around, reach
from pipeline.models.layers.precision import TypeRule
from pipeline.models.layers.tokens import Lookup
from pipeline.models.modules import composite as composite
from pipeline.models.modules import tokens as tokens
from pipeline.models.modules.apply_layers import (
    LayerContext,
    apply_layer,
    apply_layers,
    features_of,
    require_groups,
    require_images,
)
from pipeline.models.modules.batch_norm import BatchNorm
from pipeline.models.modules.layout import (
    batch_first,
    batch_last,
    channel_axis,
    first_without_batch_last,
    shape_nhwc,
)

_ACTIVATIONS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "gelu": jax.nn.gelu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "swish": jax.nn.swish,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_swish": jax.nn.hard_swish,
}


class Network(nn.Module):
    """A list of layers, from images to logits.

    Parameters and batch statistics are float32, in the collections `params` and `batch_stats`;
    dropout draws from the stream `dropout`.
    """

    layers: tuple[LayerSpec, ...]
    initializers: InitSpec
    dtype: str
    """What activations are computed in."""
    chooser: LoweringPolicy = DEFAULTS
    """How convolutions, dense layers and max pooling are computed."""
    layout: Layout = "nhwc"
    """What order of axes images are computed in; it changes neither parameters nor results, beyond
    the last digits. A convolution in CHWN is computed in one way, and the chooser is not asked."""
    rules: tuple[TypeRule, ...] = ()
    """Which layers compute in another type."""
    padding_mask: bool = False
    """Whether the last channel of what a network of tokens reads tells which of them are no padding
    (1) and which are (0); attention then reads the first alone."""

    @nn.compact
    def __call__(self, images: Array, train: bool) -> Array:
        """Logits (batch, classes), float32, of images (batch, height, width, channels).

        A network that tells classes apart at every position, of tokens or of pixels, gives
        (batch, tokens, classes) or (batch, height, width, classes).
        Raises ValueError that names the layer and the shape where one does not fit the next, and
        for a layer that the layout lacks.
        """
        site = LayerContext(
            (), self.initializers, self.dtype, train, self.chooser, self.layout, self.rules
        )
        reads_numbers = bool(self.layers) and isinstance(self.layers[0], Lookup)
        if reads_numbers and self.padding_mask:
            counted = images[..., -1].reshape(images.shape[0], -1) > 0
            images, site = images[..., :-1], dataclasses.replace(site, token_mask=counted)
        # Under rules every layer casts what it reads: the first may be one of float32.
        x = images if reads_numbers or self.rules else images.astype(self.dtype)
        if self.layout == "chwn":
            x = batch_last(_require_batch_last(self.layers, x))
        logits = batch_first(apply_layers(self.layers, x, site), self.layout)
        return logits.astype(jnp.float32)


def _require_batch_last(stack: tuple[LayerSpec, ...], images: Array) -> Array:
    """The images. Raises ValueError where they or a layer can't be computed in CHWN."""
    layer = first_without_batch_last(stack)
    if layer is not None:
        raise ValueError(
            f"layer {layer.name} is not computed in the layout chwn; the network must stay in nhwc"
        )
    if images.ndim != 4:
        raise ValueError(
            f"the layout chwn is one of images, and shape {images.shape} is none; must be nhwc"
        )
    return images


class _Conv(nn.Module):
    layer: standard.Conv
    site: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        layer, init, dtype = self.layer, self.site.initializers, self.site.dtype
        size, strides, dilation = pair(layer.kernel), pair(layer.stride), pair(layer.dilation)
        pads = _pads(x, reach(size, dilation), strides, layer.padding, self.site)
        channels = require_groups(x, layer.groups, self.site)
        features = features_of(layer.features, self.site)
        shape = (*size, channels // layer.groups, features)
        kernel = self.param("kernel", (layer.kernel_init or init.conv).build(), shape, jnp.float32)
        if self.site.layout == "chwn":
            convolve = conv2d_chwn
        else:
            convolve = functools.partial(conv2d, groups=layer.groups, chooser=self.site.chooser)
        y = convolve(x, kernel.astype(dtype), strides=strides, padding=pads, dilation=dilation)
        if layer.bias:
            bias_init = (layer.bias_init or init.bias).build()
            bias = self.param("bias", bias_init, (features,), jnp.float32).astype(dtype)
            y += bias if self.site.layout == "nhwc" else bias[:, None, None, None]
        return y


@apply_layer.register
def _conv(layer: standard.Conv, x: Array, site: LayerContext) -> Array:
    return _Conv(layer, site, name=site.name)(x)


class _ConvTranspose(nn.Module):
    layer: standard.ConvTranspose
    site: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        layer, init, dtype = self.layer, self.site.initializers, self.site.dtype
        require_images(x, self.site)
        features = features_of(layer.features, self.site)
        shape = (*pair(layer.kernel), x.shape[-1], features)
        kernel = self.param("kernel", (layer.kernel_init or init.conv).build(), shape, jnp.float32)
        y = lax.conv_transpose(
            x,
            kernel.astype(dtype),
            pair(layer.stride),
            layer.padding.upper(),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        if layer.bias:
            bias_init = (layer.bias_init or init.bias).build()
            y += self.param("bias", bias_init, (features,), jnp.float32).astype(dtype)
        return y


@apply_layer.register
def _conv_transpose(layer: standard.ConvTranspose, x: Array, site: LayerContext) -> Array:
    return _ConvTranspose(layer, site, name=site.name)(x)


@apply_layer.register
def _dense(layer: standard.Dense, x: Array, site: LayerContext) -> Array:
    if x.ndim not in (2, 3):
        raise ValueError(
            f"{site}: reads (batch, features), and shape {x.shape} reaches it; "
            "put flatten or global_avg_pool before it"
        )
    return nn.Dense(
        features_of(layer.features, site),
        use_bias=layer.bias,
        dtype=site.dtype,
        kernel_init=(layer.kernel_init or site.initializers.dense).build(),
        bias_init=(layer.bias_init or site.initializers.bias).build(),
        dot_general=dense_product(site.chooser),
        name=site.name,
    )(x)


@apply_layer.register
def _batch_norm(layer: standard.BatchNorm, x: Array, site: LayerContext) -> Array:
    return BatchNorm(
        train=site.train,
        axis=channel_axis(x, site.layout),
        momentum=layer.momentum,
        epsilon=layer.epsilon,
        dtype=site.dtype,
        scale_init=layer.scale_init,
        name=site.name,
    )(x)


@apply_layer.register
def _layer_norm(layer: standard.LayerNorm, x: Array, site: LayerContext) -> Array:
    return nn.LayerNorm(layer.epsilon, dtype=site.dtype, name=site.name)(x)


@apply_layer.register
def _group_norm(layer: standard.GroupNorm, x: Array, site: LayerContext) -> Array:
    require_groups(x, layer.groups, site)
    return nn.GroupNorm(layer.groups, epsilon=layer.epsilon, dtype=site.dtype, name=site.name)(x)


@apply_layer.register
def _dropout(layer: standard.Dropout, x: Array, site: LayerContext) -> Array:
    dropout = nn.Dropout(layer.rate, deterministic=not site.train, name=site.name)
    if channel_axis(x, site.layout) == 0:
        # The mask is drawn as for images in NHWC, so that the same values are dropped.
        return batch_last(dropout(batch_first(x, site.layout)))
    return dropout(x)


@apply_layer.register
def _activation(layer: standard.Activation, x: Array, site: LayerContext) -> Array:
    with jax.named_scope(site.name):
        return _ACTIVATIONS[layer.name](x)


@apply_layer.register
def _max_pool(layer: standard.MaxPool, x: Array, site: LayerContext) -> Array:
    window, strides, pads = _pooling(layer, x, site)
    with jax.named_scope(site.name):
        return pool_max(x, window, strides, pads, site.chooser)


@apply_layer.register
def _avg_pool(layer: standard.AvgPool, x: Array, site: LayerContext) -> Array:
    window, strides, pads = _pooling(layer, x, site)
    with jax.named_scope(site.name):
        mean = nn.avg_pool(x, window, strides, pads, count_include_pad=False)
        return mean.astype(x.dtype)


@apply_layer.register
def _global_avg_pool(layer: standard.GlobalAvgPool, x: Array, site: LayerContext) -> Array:
    require_images(x, site)
    with jax.named_scope(site.name):
        mean = x.mean((1, 2))
        return mean if site.layout == "nhwc" else mean.T


@apply_layer.register
def _upsample(layer: standard.Upsample, x: Array, site: LayerContext) -> Array:
    require_images(x, site)
    batch, height, width, channels = x.shape
    shape = (batch, height, layer.factor, width, layer.factor, channels)
    with jax.named_scope(site.name):
        repeated = jnp.broadcast_to(x[:, :, None, :, None], shape)
        return repeated.reshape(batch, height * layer.factor, width * layer.factor, channels)


@apply_layer.register
def _channel_shuffle(layer: standard.ChannelShuffle, x: Array, site: LayerContext) -> Array:
    require_groups(x, layer.groups, site)
    with jax.named_scope(site.name):
        grouped = x.reshape(*x.shape[:-1], layer.groups, -1)
        return grouped.swapaxes(-1, -2).reshape(x.shape)


@apply_layer.register
def _flatten(layer: standard.Flatten, x: Array, site: LayerContext) -> Array:
    x = batch_first(x, site.layout)
    return x.reshape(x.shape[0], -1)


def _pooling(
    layer: standard.Pool, x: Array, site: LayerContext
) -> tuple[Pair, Pair, tuple[Pair, Pair]]:
    """Window, strides and pads."""
    window = pair(layer.kernel)
    strides = window if layer.stride is None else pair(layer.stride)
    return window, strides, _pads(x, window, strides, layer.padding, site)


def _pads(
    x: Array, window: Pair, strides: Pair, padding: standard.Padding, site: LayerContext
) -> tuple[Pair, Pair]:
    """What is put (before, after) height and width; ValueError where no window fits into that."""
    require_images(x, site)
    sizes = (x.shape[1], x.shape[2])
    rows, columns = pads_around(sizes, window, strides, padding)
    if sizes[0] + sum(rows) < window[0] or sizes[1] + sum(columns) < window[1]:
        raise ValueError(
            f"{site}: a window of {window[0]}x{window[1]} does not fit into shape "
            f"{shape_nhwc(x, site.layout)}; the images are too small for this network, "
            "or the layers before shrink them too much"
        )
    return rows, columns
