"""Computations of convolutions, in one to three dimensions or transposed, and of dense layers.

Gradients of biases are summed in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import pair, triple
from pipeline.models.layers.precision import Products
from pipeline.models.lowerings.conv2d_chwn import conv2d_chwn
from pipeline.models.lowerings.lowered_layers import conv2d, multiply_dense
from pipeline.models.lowerings.problem import DEFAULTS, LoweringPolicy, Pair, compute_reach
from pipeline.models.modules.apply_layers import (
    LayerContext,
    WindowPadding,
    channel_axis,
    compute_pads,
    computes,
    require_groups,
    require_images,
    require_number,
    shape_nhwc,
)


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


class DenseModule(nn.Dense):
    """`nn.Dense` with float32 parameters, `multiply_dense` and `add_bias`."""

    policy: LoweringPolicy = DEFAULTS
    products: Products = "plain"

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Multiply inputs (..., channels) by the kernel and add the bias: (..., features)."""
        shape = (inputs.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), jnp.float32)
        inputs = inputs.astype(self.dtype)
        if self.products == "float8":
            from pipeline.models.modules.float8 import multiply_float8

            product = multiply_float8(inputs, kernel)
        else:
            product = multiply_dense(inputs, kernel.astype(self.dtype), self.policy)
        return product if bias is None else add_bias(product, bias)


def add_bias(x: Array, bias: Array, axis: int = -1, *, rounds_bias: bool = True) -> Array:
    """Add a float32 bias (features,) along an axis of x; the result has the type of x.

    With `rounds_bias` the bias is rounded to that type first, as in MindSpore's layers.

    The gradient of the bias is summed in float32. In bfloat16 every addition would be rounded, and
    XLA:CPU would take 6 ms instead of 0.2 for 4160 rows of 768 on 2 cores. If the types differ,
    forward mode isn't supported.
    """
    axis %= x.ndim
    if x.dtype == bias.dtype:
        return x + _spread(bias, x.ndim, axis)
    return _add(axis, rounds_bias, x, bias)


def _spread(bias: Array, dimensions: int, axis: int) -> Array:
    return bias.reshape([-1 if position == axis else 1 for position in range(dimensions)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _add(axis: int, rounds_bias: bool, x: Array, bias: Array) -> Array:
    addend = bias.astype(x.dtype) if rounds_bias else bias
    return (x + _spread(addend, x.ndim, axis)).astype(x.dtype)


def _backward(axis: int, rounds_bias: bool, _: None, cotangent: Array) -> tuple[Array, Array]:
    axes = tuple(position for position in range(cotangent.ndim) if position != axis)
    return cotangent, cotangent.astype(jnp.float32).sum(axes)


_add.defvjp(
    lambda axis, rounds_bias, x, bias: (_add(axis, rounds_bias, x, bias), None),
    _backward,
)
