"""A dense layer, and biases whose gradients are summed in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.models.lowerings.dense import multiply_dense
from pipeline.models.lowerings.problem.lowering import DEFAULTS, LoweringPolicy


class DenseModule(nn.Dense):
    """`nn.Dense` with float32 parameters, `multiply_dense` and `add_bias`."""

    policy: LoweringPolicy = DEFAULTS

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Multiply inputs (..., channels) by the kernel and add the bias: (..., features)."""
        shape = (inputs.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), jnp.float32)
        product = multiply_dense(inputs.astype(self.dtype), kernel.astype(self.dtype), self.policy)
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
