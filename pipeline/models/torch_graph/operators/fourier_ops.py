"""Complex numbers and Fourier transforms.

Complex arrays are complex64 whatever the dtype of activations, in which the real arrays made from
them are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.torch_graph.operator_table import OperatorContext, aten, valuewise
from pipeline.models.torch_graph.tensor import TorchTensor, align, to_tensor

Axes = Sequence[int]


def is_complex(x: Array | TorchTensor) -> bool:
    """Return whether an array has complex numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))


def _with_32_bits(x: Array) -> Array:
    return x if is_complex(x) else x.astype(jnp.float32)


@aten("view_as_real.default")
def view_as_real(context: OperatorContext, x: TorchTensor) -> TorchTensor:
    """Return real and imaginary parts as a last axis of size 2."""
    array = x.plain()
    parts = jnp.stack([array.real, array.imag], -1)
    return to_tensor(parts.astype(context.dtype))


@aten("view_as_complex.default")
def view_as_complex(x: TorchTensor) -> TorchTensor:
    """Return the complex numbers whose parts are the last axis."""
    array = x.plain().astype(jnp.float32)
    return to_tensor(lax.complex(array[..., 0], array[..., 1]))


def _join_parts(real: Any, imaginary: Any) -> TorchTensor:
    (first, second), order = align((real, imaginary))
    first, second = jnp.broadcast_arrays(_with_32_bits(first), _with_32_bits(second))
    return TorchTensor(lax.complex(first, second), order)


aten("complex.default")(_join_parts)


@aten("polar.default")
def polar(length: TorchTensor, angle: TorchTensor) -> TorchTensor:
    """Return the complex numbers of a length and an angle."""
    (radius, phase), order = align((length, angle))
    radius, phase = _with_32_bits(radius), _with_32_bits(phase)
    return TorchTensor(lax.complex(radius * jnp.cos(phase), radius * jnp.sin(phase)), order)


def _register_part(name: str, function: Callable[[Array], Array]) -> None:
    """Register a real function of complex numbers."""

    @aten(f"{name}.default")
    def take(context: OperatorContext, x: TorchTensor) -> TorchTensor:
        result = function(x.array)
        return x.with_array(result.astype(context.dtype) if is_complex(x) else result)


_register_part("real", jnp.real)
_register_part("imag", jnp.imag)
_register_part("angle", jnp.angle)
aten("conj.default", "_conj.default", "conj_physical.default", "_conj_physical.default")(
    valuewise(jnp.conj)
)
aten("resolve_conj.default", "resolve_neg.default")(lambda x: x)
aten("sgn.default")(valuewise(jnp.sign))


def _scale(x: Array, axes: Axes, shape: Sequence[int], normalization: int) -> Array:
    """Divide by the root of the number of values for normalization 1, by the number for 2."""
    count = math.prod(shape[axis] for axis in axes)
    return x if normalization == 0 else x / (math.sqrt(count) if normalization == 1 else count)


@aten("_fft_r2c.default")
def transform_real(x: TorchTensor, dim: Axes, normalization: int, onesided: bool) -> TorchTensor:
    """Transform real numbers; one-sided, the last axis of `dim` has the first half of numbers."""
    array = x.plain().astype(jnp.float32)
    axes = [axis % x.ndim for axis in dim]
    if onesided:
        *others, last = axes
        y = jnp.fft.rfft(array, axis=last)
        y = jnp.fft.fftn(y, axes=others) if others else y
    else:
        y = jnp.fft.fftn(array.astype(jnp.complex64), axes=axes)
    return to_tensor(_scale(y, axes, array.shape, normalization))


@aten("_fft_c2c.default")
def transform_complex(x: TorchTensor, dim: Axes, normalization: int, forward: bool) -> TorchTensor:
    """Transform complex numbers forwards, or backwards without a factor."""
    array = x.plain().astype(jnp.complex64)
    axes = [axis % x.ndim for axis in dim]
    if not axes:
        return to_tensor(array)
    y = jnp.fft.fftn(array, axes=axes) if forward else jnp.fft.ifftn(array, axes=axes, norm=BARE)
    return to_tensor(_scale(y, axes, array.shape, normalization))


BARE = "forward"
"""Name in jax.numpy of an inverse transform without a factor."""


@aten("_fft_c2r.default")
def transform_to_real(
    context: OperatorContext, x: TorchTensor, dim: Axes, normalization: int, last_dim_size: int
) -> TorchTensor:
    """Transform backwards the first half of numbers to `last_dim_size` real ones."""
    array = x.plain().astype(jnp.complex64)
    axes = [axis % x.ndim for axis in dim]
    *others, last = axes
    if others:
        array = jnp.fft.ifftn(array, axes=others, norm=BARE)
    y = jnp.fft.irfft(array, last_dim_size, axis=last, norm=BARE)
    return to_tensor(_scale(y, axes, y.shape, normalization).astype(context.dtype))
