"""Distances, solutions of equations and decompositions of matrices, in float32, and products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pipeline.models.torch_graph.operator_table import OperatorContext, aten, plain
from pipeline.models.torch_graph.tensor import TorchTensor, to_tensor


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
    # A power of 0 has no gradient that is finite.
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


# Results after the first are of PyTorch's own gradient, and no network reads them.
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
_register("linalg_qr.default")(lambda x, mode="reduced": tuple(jnp.linalg.qr(x, mode=mode)))
_register("linalg_eigh.default", "_linalg_eigh.default")(
    lambda x, UPLO="L", *_: tuple(jnp.linalg.eigh(x, UPLO=UPLO, symmetrize_input=False))  # noqa: N803
)
_register("linalg_matrix_exp.default", "matrix_exp.default")(jax.scipy.linalg.expm)


@_register("linalg_svd.default", "_linalg_svd.default")
def decompose(
    x: Array, full_matrices: bool = True, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Array, ...]:
    """Return U, the singular values and the transpose of V."""
    if not compute_uv:
        values = jnp.linalg.svd(x, compute_uv=False)
        return values, values, values
    return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))


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
aten("cross.default")(plain(lambda x, y, dim=-1: jnp.cross(x, y, axis=dim)))


# A program of torch.export has the second name, of transformers' experts.
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
        raise ValueError(f"grouped products of shapes {first.shape} and {second.shape}")
    sizes = jnp.diff(offs, prepend=jnp.zeros(1, offs.dtype))
    return lax.ragged_dot(first, second.astype(first.dtype), sizes.astype(jnp.int32))
