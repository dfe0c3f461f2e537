"""Computations of convolutions in one to three dimensions, and of a transposed convolution."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.models.layers import standard
from pipeline.models.layers.fields import pair, triple
from pipeline.models.lowerings.conv2d import conv2d
from pipeline.models.lowerings.conv2d_chwn import conv2d_chwn
from pipeline.models.lowerings.problem.conv_window import Pair, compute_reach
from pipeline.models.modules.apply_layers import (
    LayerContext,
    computes,
    require_groups,
    require_images,
    require_number,
)
from pipeline.models.modules.dense import add_bias
from pipeline.models.modules.layout import WindowPadding, channel_axis, compute_pads, shape_nhwc


class ConvolutionModule(nn.Module):
    """Fields of the flax module of a convolution."""

    layer: Any
    """Description of the convolution."""
    context: LayerContext


@computes(standard.Conv)
class _Conv(ConvolutionModule):
    layer: standard.Conv

    @nn.compact
    def __call__(self, x: Array) -> Array:
        layer = self.layer
        require_images(x, self.context)
        size = pair(layer.kernel)
        strides = pair(layer.stride)
        dilation = pair(layer.dilation)
        pads = find_pads(x, compute_reach(size, dilation), strides, layer.padding, self.context)
        kernel = make_kernel(self, x, size)
        if self.context.layout == "chwn":
            convolve = conv2d_chwn
        else:
            convolve = functools.partial(conv2d, groups=layer.groups, policy=self.context.policy)
        y = convolve(x, kernel, strides=strides, padding=pads, dilation=dilation)
        return add_layer_bias(self, y)


@computes(standard.Conv3d)
class _Conv3d(ConvolutionModule):
    layer: standard.Conv3d

    @nn.compact
    def __call__(self, x: Array) -> Array:
        layer = self.layer
        if x.ndim != 5:
            raise ValueError(
                f"{self.context}: shape {x.shape} reaches the layer; must be volumes (batch, "
                "depth, height, width, channels): put reshape before it"
            )
        size, strides, dilation = map(triple, (layer.kernel, layer.stride, layer.dilation))
        pads = find_pads(x, compute_reach(size, dilation), strides, layer.padding, self.context)
        y = jax.lax.conv_general_dilated(
            x,
            make_kernel(self, x, size),
            strides,
            pads,
            rhs_dilation=dilation,
            dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
            feature_group_count=layer.groups,
        )
        return add_layer_bias(self, y)


@computes(standard.ConvTranspose)
class _ConvTranspose(ConvolutionModule):
    layer: standard.ConvTranspose

    @nn.compact
    def __call__(self, x: Array) -> Array:
        from pipeline.models.lowerings.conv2d_transpose import conv2d_transpose

        layer = self.layer
        require_images(x, self.context)
        y = conv2d_transpose(
            x,
            make_kernel(self, x, pair(layer.kernel)),
            strides=pair(layer.stride),
            padding="SAME" if layer.padding == "same" else "VALID",
            groups=layer.groups,
            policy=self.context.policy,
        )
        return add_layer_bias(self, y)


# These aren't methods, since flax adds the name of a method to profiles, as a scope.
def make_kernel(module: ConvolutionModule, x: Array, size: tuple[int, ...]) -> Array:
    """Return the kernel (*size, channels // groups, features), in the type of the context."""
    layer = module.layer
    channels = require_groups(x, layer.groups, module.context)
    features = require_number(layer.features, module.context)
    init = (layer.kernel_init or module.context.initializers.conv).build()
    shape = (*size, channels // layer.groups, features)
    kernel: Array = module.param("kernel", init, shape, jnp.float32)
    return kernel.astype(module.context.dtype)


def add_layer_bias(module: ConvolutionModule, y: Array) -> Array:
    """Add the bias to the channels of y, if the layer has one."""
    if not module.layer.bias:
        return y
    axis = channel_axis(y, module.context.layout)
    init = (module.layer.bias_init or module.context.initializers.bias).build()
    return add_bias(y, module.param("bias", init, (y.shape[axis],), jnp.float32), axis)


def find_pads(
    x: Array,
    window: tuple[int, ...],
    strides: tuple[int, ...],
    padding: WindowPadding,
    context: LayerContext,
) -> tuple[Pair, ...]:
    """Return the pads (before, after) of each spatial axis. Raises ValueError if no window fits."""
    sizes = x.shape[1:-1]
    pads = compute_pads(sizes, window, strides, padding)
    if any(n + sum(pad) < size for n, pad, size in zip(sizes, pads, window, strict=True)):
        raise ValueError(
            f"{context}: a window of {'x'.join(map(str, window))} does not fit into shape "
            f"{shape_nhwc(x, context.layout)}; the images are too small for this network, "
            "or the layers before shrink them too much"
        )
    return pads
