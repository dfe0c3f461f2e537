"""Formulas of a dense layer's three products: (problem, lowering, first, second) -> result."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata

from pipeline.models.lowerings.formulas import onednn
from pipeline.models.lowerings.problem.lowering import Formula, Lowering, Role
from pipeline.models.lowerings.problem.problems import DenseProblem

SUM_AXES: Mapping[Role, tuple[int, int]] = {
    "forward": (1, 0),
    "input_grad": (1, 1),
    "weight_grad": (0, 0),
}
"""Axes of the left and of the right matrix over which a product sums, by role. Left and right are
inputs and kernel (forward), cotangent and kernel (input_grad), inputs and cotangent
(weight_grad)."""


def product(problem: DenseProblem, lowering: Lowering, first: Array, second: Array) -> Array:
    """Multiply the role's left and right matrix, see `SUM_AXES`."""
    left, right = _order_operands(problem, first, second)
    return _multiply(lowering, left, right, *SUM_AXES[problem.role])


def transposed_product(
    problem: DenseProblem, lowering: Lowering, first: Array, second: Array
) -> Array:
    """Multiply the transposes, right by left, and transpose the result.

    Libraries split the rows of a product among cores and its columns among vectors, so the order
    decides the speed.
    """
    left, right = _order_operands(problem, first, second)
    left_axis, right_axis = SUM_AXES[problem.role]
    transposed = _multiply(lowering, right, left, right_axis, left_axis)
    # Without a separate call, XLA would move the transpose back into the product.
    with set_xla_metadata(inlineable="false"):
        return jax.jit(jnp.transpose)(transposed)


def _order_operands(problem: DenseProblem, first: Array, second: Array) -> tuple[Array, Array]:
    """Return the left and the right matrix of `SUM_AXES` from the operands of the role. Those of
    `input_grad` are kernel and cotangent."""
    return (second, first) if problem.role == "input_grad" else (first, second)


def _multiply(
    lowering: Lowering, left: Array, right: Array, left_axis: int, right_axis: int
) -> Array:
    if lowering.engine == "onednn":
        return onednn.matmul(left, right, transpose_a=left_axis == 0, transpose_b=right_axis == 1)
    dimensions = (((left_axis,), (right_axis,)), ((), ()))
    summed = lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)
    return summed.astype(left.dtype)


PRODUCTS: Mapping[Role, Mapping[str, Formula]] = {
    role: {"product": Formula(product), "transposed": Formula(transposed_product)}
    for role in SUM_AXES
}
"""Formulas by role and name. The first always works with XLA's engine."""
