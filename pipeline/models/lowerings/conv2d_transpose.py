"""The transpose of a two-dimensional convolution: the fastest lowering for each computation.

The result is the input gradient of a convolution, and the gradients are that convolution and its
weight gradient. So the problems are the convolution's, with the result in place of its
images. For the weight gradient that jax derives, XLA:CPU makes a scalar loop, with 1 GFLOP/s in a
training loop (jax issue 12868). On other platforms the gradients are those that jax derives.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
from jax import Array, lax

from pipeline.models.lowerings.candidates import plan_layer
from pipeline.models.lowerings.formulas import conv2d_weight_grad
from pipeline.models.lowerings.formulas.conv2d_input_grad import rotate_and_swap, slide
from pipeline.models.lowerings.lowered_layers import XLA_CONVOLUTION, Plan, convolve
from pipeline.models.lowerings.problem import (
    DEFAULTS,
    ConvolutionProblem,
    ConvWindow,
    LoweringPolicy,
    Pair,
    Role,
    make_window,
)

Padding = Literal["SAME", "VALID"]
_Operands = tuple[Array, Array]


def conv2d_transpose(
    x: Array,
    kernel: Array,
    *,
    strides: Pair = (1, 1),
    padding: Padding = "SAME",
    groups: int = 1,
    policy: LoweringPolicy = DEFAULTS,
) -> Array:
    """Spread images (batch, height, width, channels) by the strides and slide a kernel over them.

    The kernel is (height, width, channels // groups, features), of the same dtype, and not rotated,
    as in `jax.lax.conv_transpose`. The result has size * stride positions, with "VALID" also the
    kernel's size - stride more if that is above 0. `policy` chooses how the result and the
    gradients are computed. Forward-mode differentiation isn't supported.
    """
    rows, columns, _, _ = kernel.shape
    height = x.shape[1] * strides[0]
    width = x.shape[2] * strides[1]
    if padding == "VALID":
        height += max(rows - strides[0], 0)
        width += max(columns - strides[1], 0)
    window = make_window((height, width), (rows, columns), strides, padding, (1, 1), groups)
    return transpose_window(window, x, kernel, policy)


def transpose_window(window: ConvWindow, x: Array, kernel: Array, policy: LoweringPolicy) -> Array:
    """Transpose the convolution that slides by `window` over images of the result's size. The
    kernel is HWIO, of the same dtype as x (batch, height, width, channels), and not rotated:
    (height, width, channels // groups, features). Forward-mode differentiation isn't supported."""

    def make_problem(role: Role) -> ConvolutionProblem:
        batch, *_, channels = x.shape
        return ConvolutionProblem(role, window, batch, kernel.shape[3], channels, str(x.dtype))

    return _transpose(plan_layer(policy, make_problem), x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _transpose(plan: Plan, x: Array, kernel: Array) -> Array:
    window = plan.forward.problem.window
    if plan.input_grad.is_default:
        return slide(window, kernel, x)
    return plan.input_grad(rotate_and_swap(kernel, window.groups), x)


def _backward(plan: Plan, operands: _Operands, cotangent: Array) -> _Operands:
    if plan.forward.is_default and plan.weight_grad.is_default:
        return lax.platform_dependent(
            operands,
            cotangent,
            cpu=functools.partial(_compute_gradients, plan),
            default=functools.partial(_derive_gradients, plan),
        )
    return _compute_gradients(plan, operands, cotangent)


_transpose.defvjp(
    lambda plan, x, kernel: (_transpose(plan, x, kernel), (x, kernel)),
    _backward,
)


def _compute_gradients(plan: Plan, operands: _Operands, cotangent: Array) -> _Operands:
    x, kernel = operands
    window = plan.forward.problem.window
    rotated = rotate_and_swap(kernel, window.groups)
    x_grad = convolve(plan, cotangent, rotated)
    if plan.weight_grad.is_default:
        rotated_grad = conv2d_weight_grad.convolution(window, XLA_CONVOLUTION, cotangent, x)
    else:
        rotated_grad = plan.weight_grad(cotangent, x)
    return x_grad, rotate_and_swap(rotated_grad, window.groups)


def _derive_gradients(plan: Plan, operands: _Operands, cotangent: Array) -> _Operands:
    x, kernel = operands
    window = plan.forward.problem.window
    pull_x = jax.linear_transpose(lambda x: slide(window, kernel, x), x)
    pull_kernel = jax.linear_transpose(lambda kernel: slide(window, kernel, x), kernel)
    return *pull_x(cotangent), *pull_kernel(cotangent)
