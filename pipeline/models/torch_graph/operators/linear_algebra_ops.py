"""Linear algebra in float32, complex numbers and Fourier transforms.

Distances, solutions of equations, decompositions of matrices, and products.

Complex arrays are complex64 whatever the dtype of activations, in which the real arrays made from
them are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pipeline.models.torch_graph.operator_table import (
    OperatorContext,
    TorchTensor,
    align,
    aten,
    plain,
    to_tensor,
    valuewise,
)

Axes = Sequence[int]
UNSCALED = "forward"
"""Normalisation by which an inverse transform of jax.numpy has no factor."""


def power_norm(x: Array, power: float, axis: Any, keepdims: bool = False) -> Array:
    """Return the p-norm over axes, whose gradient at 0 is 0 as PyTorch's is.

    p may be infinite, and 0 for the number of values that aren't 0.
    """
    size = jnp.abs(x)
    if power == 0:
        return jnp.sum((size != 0).astype(size.dtype), axis=axis, keepdims=keepdims)
    if power == 1:
        return jnp.sum(size, axis=axis, keepdims=keepdims)
    if abs(power) == np.inf:
        reduce = jnp.max if power > 0 else jnp.min
        return reduce(size, axis=axis, keepdims=keepdims)
    if power == 2:
        total = jnp.sum(jnp.square(size), axis=axis, keepdims=keepdims)
        return _root(total, 2)
    # The gradient of 0 ** power isn't finite for a power below 1.
    is_zero = size == 0
    powers = jnp.where(
        is_zero, 0.0**power if power > 0 else np.inf, _one_at(is_zero, size) ** power
    )
    return _root(jnp.sum(powers, axis=axis, keepdims=keepdims), power)


def _one_at(place: Array, x: Array) -> Array:
    return jnp.where(place, jnp.ones_like(x), x)


def _root(x: Array, power: float) -> Array:
    """Return x ** (1 / power), with a gradient of 0 at 0."""
    is_zero = x == 0
    safe = _one_at(is_zero, x)
    root = jnp.sqrt(safe) if power == 2 else safe ** (1 / power)
    return jnp.where(is_zero, jnp.zeros_like(x), root)


@aten("cdist.default", "_cdist_forward.default")
@plain
def cdist(first: Any, second: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """Return the distance of each row of the first from each row of the second."""
    return power_norm(first[..., :, None, :] - second[..., None, :, :], p, -1)


@aten("pdist.default", "_pdist_forward.default")
@plain
def pdist(x: Any, p: float = 2.0) -> Any:
    """Return the distances of all pairs of rows."""
    rows, columns = np.triu_indices(x.shape[0], 1)
    return power_norm(x[rows] - x[columns], p, -1)


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of matrices that computes in float32, with results in its dtype."""

    def compute(context: OperatorContext, *args: Any, **options: Any) -> Any:
        arrays = [x.plain() if isinstance(x, TorchTensor) else x for x in args]
        wide = [_widen(x) if isinstance(x, Array) else x for x in arrays]
        results = function(*wide, **options)
        dtype = jnp.dtype(context.dtype)

        def narrow(y: Array) -> TorchTensor:
            is_real = jnp.issubdtype(y.dtype, jnp.floating)
            return to_tensor(y.astype(dtype) if is_real else y)

        return jax.tree.map(narrow, results)

    return compute


def _widen(x: Array) -> Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _register(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        aten(*names)(_in_float32(function))
        return function

    return decorate


@_register("linalg_solve.default")
def solve(matrix: Array, right: Array, *, left: bool = True) -> Array:
    """Return X of A X = B, or of X A = B unless `left`. B may be a vector."""
    if not left:
        solved = solve(jnp.swapaxes(matrix, -1, -2), jnp.swapaxes(right, -1, -2))
        return jnp.swapaxes(solved, -1, -2)
    is_vector = right.ndim == 1 or right.shape == matrix.shape[:-1]
    columns = right[..., None] if is_vector else right
    batch = jnp.broadcast_shapes(matrix.shape[:-2], columns.shape[:-2])
    matrix = jnp.broadcast_to(matrix, (*batch, *matrix.shape[-2:]))
    columns = jnp.broadcast_to(columns, (*batch, *columns.shape[-2:]))
    solved = jnp.linalg.solve(matrix, columns)
    return solved[..., 0] if is_vector else solved


# Other results of PyTorch's, such as the LU decomposition, serve its gradient, no network.
_register("_linalg_solve_ex.default", "linalg_solve_ex.default")(
    lambda matrix, right, *, left=True, check_errors=False: (solve(matrix, right, left=left),)
)
_register("linalg_inv.default", "inverse.default")(jnp.linalg.inv)
_register("linalg_inv_ex.default")(lambda x, *, check_errors=False: (jnp.linalg.inv(x),))
_register("linalg_det.default", "det.default")(jnp.linalg.det)
_register("_linalg_det.default")(lambda x: (jnp.linalg.det(x),))
_register("linalg_slogdet.default", "_linalg_slogdet.default")(
    lambda x: tuple(jnp.linalg.slogdet(x))
)
_register("linalg_cholesky.default")(lambda x, *, upper=False: jnp.linalg.cholesky(x, upper=upper))
_register("linalg_cholesky_ex.default")(
    lambda x, *, upper=False, check_errors=False: (jnp.linalg.cholesky(x, upper=upper),)
)
_register("linalg_eigh.default", "_linalg_eigh.default")(
    lambda x, UPLO="L", *_: tuple(jnp.linalg.eigh(x, UPLO=UPLO, symmetrize_input=False))  # noqa: N803
)
_register("linalg_matrix_exp.default", "matrix_exp.default")(jax.scipy.linalg.expm)


@_register("linalg_qr.default")
def decompose_qr(x: Array, mode: str = "reduced") -> tuple[Array, Array]:
    """Return Q and R. In mode "r", Q is empty."""
    if mode == "r":
        return jnp.zeros(0, x.dtype), jnp.linalg.qr(x, mode="r")
    q, r = jnp.linalg.qr(x, mode=mode)
    return q, r


@_register("linalg_svd.default")
def decompose_svd(
    x: Array, full_matrices: bool = True, *, driver: str | None = None
) -> tuple[Array, ...]:
    """Return U, the singular values and the transpose of V."""
    return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))


@_register("_linalg_svd.default")
def decompose_svd_or_values(
    x: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Array, ...]:
    """Return U, the singular values and the transpose of V; both are empty if not `compute_uv`."""
    if compute_uv:
        return decompose_svd(x, full_matrices)
    empty = jnp.zeros(0, x.dtype)
    return empty, jnp.linalg.svd(x, compute_uv=False), empty


@_register("linalg_solve_triangular.default")
def solve_triangular(
    matrix: Array, right: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    """Return X of A X = B for a triangular A, or of X A = B unless `left`."""
    batch = jnp.broadcast_shapes(matrix.shape[:-2], right.shape[:-2])
    matrix = jnp.broadcast_to(matrix, (*batch, *matrix.shape[-2:]))
    right = jnp.broadcast_to(right, (*batch, *right.shape[-2:]))
    return lax.linalg.triangular_solve(
        matrix, right, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


aten("vdot.default")(plain(jnp.vdot))
aten("linalg_cross.default")(plain(lambda x, y, *, dim=-1: jnp.cross(x, y, axis=dim)))


@aten("cross.default")
@plain
def cross(x: Any, y: Any, dim: int | None = None) -> Any:
    """Return cross products along an axis; by default along the first one of size 3."""
    if dim is None:
        shape = jnp.broadcast_shapes(x.shape, y.shape)
        axes = [axis for axis, size in enumerate(shape) if isinstance(size, int) and size == 3]
        if not axes:
            raise ValueError(f"cross products of shape {shape}: an axis must have size 3")
        dim = axes[0] - len(shape)
    return jnp.cross(x, y, axis=dim)


# The first name is of transformers, whose experts call it.
@aten("grouped_mm_fallback.default", library="transformers")
@aten("_grouped_mm.default")
@plain
def grouped_products(
    first: Any, second: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Return products of groups of rows, each with the matrix of its group.

    `first` is (rows, in), `second` (groups, in, out), and `offs` the end of each group's rows, or
    both are (groups, rows, in) and (groups, in, out) without it. Rows after the last group are 0.
    """
    if bias is not None:
        raise ValueError("grouped products must have no bias")
    if first.ndim == 3 and second.ndim == 3:
        return jnp.matmul(first, second)
    if first.ndim != 2 or second.ndim != 3 or offs is None:
        problem = f"grouped products of shapes {first.shape} and {second.shape}"
        raise ValueError(f"{problem}; must be (rows, in) and (groups, in, out), with offsets")
    sizes = jnp.diff(offs, prepend=jnp.zeros(1, offs.dtype))
    return lax.ragged_dot(first, second.astype(first.dtype), sizes.astype(jnp.int32))


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
    y = (
        jnp.fft.fftn(array, axes=axes)
        if forward
        else jnp.fft.ifftn(array, axes=axes, norm=UNSCALED)
    )
    return to_tensor(_scale(y, axes, array.shape, normalization))


@aten("_fft_c2r.default")
def transform_to_real(
    context: OperatorContext, x: TorchTensor, dim: Axes, normalization: int, last_dim_size: int
) -> TorchTensor:
    """Transform backwards the first half of numbers to `last_dim_size` real ones."""
    array = x.plain().astype(jnp.complex64)
    axes = [axis % x.ndim for axis in dim]
    *others, last = axes
    if others:
        array = jnp.fft.ifftn(array, axes=others, norm=UNSCALED)
    y = jnp.fft.irfft(array, last_dim_size, axis=last, norm=UNSCALED)
    return to_tensor(_scale(y, axes, y.shape, normalization).astype(context.dtype))
