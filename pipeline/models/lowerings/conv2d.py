"""Two-dimensional convolution: the fastest lowering for each of its three computations.

XLA:CPU has a fast library for convolutions in the layouts NHWC, HWIO and NHWC. The gradients that
jax derives permute those dimensions. Outside of loops the compiler permutes them back. In the body
of a `fori_loop` or a `scan` it makes a scalar loop that is 10 to 100 times slower (jax issue
12868). So on the CPU both gradients are computed here as convolutions in those layouts, with
explicit transposes, or by the lowerings that the policy chooses. Compilers for other platforms are
fast with the gradients that jax derives.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata

from pipeline.models.lowerings.candidates import LayerPlan, plan_layer
from pipeline.models.lowerings.formulas import conv2d_forward, conv2d_input_grad, conv2d_weight_grad
from pipeline.models.lowerings.problem.conv_window import Pair, make_window
from pipeline.models.lowerings.problem.lowering import DEFAULTS, Lowering, LoweringPolicy
from pipeline.models.lowerings.problem.problems import ConvolutionProblem, make_convolution_problem

XLA_CONVOLUTION = Lowering("convolution")


def conv2d(
    images: Array,
    kernel: Array,
    *,
    strides: Pair = (1, 1),
    padding: str | Sequence[Pair] = "SAME",
    dilation: Pair = (1, 1),
    groups: int = 1,
    policy: LoweringPolicy = DEFAULTS,
) -> Array:
    """Convolve images (batch, height, width, channels) with a kernel of the same dtype.

    The kernel is HWIO: (height, width, channels // groups, features). The result has shape
    (batch, height, width, features). `padding` is "SAME", "VALID" or the numbers of zeros ((top,
    bottom), (left, right)); `dilation` spreads the kernel. `policy` chooses how the convolution and
    its gradients are computed. Forward-mode differentiation isn't supported.
    """
    _, height, width, _ = images.shape
    rows, columns, _, _ = kernel.shape
    window = make_window((height, width), (rows, columns), strides, padding, dilation, groups)
    plan = plan_layer(policy, lambda role: make_convolution_problem(role, window, images, kernel))
    return _conv2d(plan, images, kernel)


Plan = LayerPlan[ConvolutionProblem]
"""Choices for a convolution and its gradients."""
_Operands = tuple[Array, Array]


def convolve(plan: Plan, images: Array, kernel: Array) -> Array:
    """Convolve by the plan's forward lowering. The default is XLA's convolution."""
    if plan.forward.is_default:
        window = plan.forward.problem.window
        return conv2d_forward.convolution(window, XLA_CONVOLUTION, images, kernel)
    return plan.forward(images, kernel)


_conv2d = jax.custom_vjp(convolve, nondiff_argnums=(0,))


def _backward(plan: Plan, operands: _Operands, cotangent: Array) -> _Operands:
    if plan.input_grad.is_default and plan.weight_grad.is_default:
        return lax.platform_dependent(
            operands,
            cotangent,
            cpu=functools.partial(_compute_gradients, plan),
            default=functools.partial(_derive_gradients, plan),
        )
    return _compute_gradients(plan, operands, cotangent)


_conv2d.defvjp(
    lambda plan, images, kernel: (convolve(plan, images, kernel), (images, kernel)),
    _backward,
)


def _compute_gradients(plan: Plan, operands: _Operands, cotangent: Array) -> _Operands:
    images, kernel = operands
    # Without a separate call, XLA would fuse the operations that compute the images, sometimes a
    # stage of residual blocks, into their transpose, and repeat them for every strided element.
    with set_xla_metadata(inlineable="false"):
        kernel_grad = jax.jit(_compute_weight_grad, static_argnums=0)(plan, images, cotangent)
    return _compute_input_grad(plan, kernel, cotangent), kernel_grad


def _derive_gradients(plan: Plan, operands: _Operands, cotangent: Array) -> _Operands:
    images, kernel = operands
    pull_images = jax.linear_transpose(lambda images: convolve(plan, images, kernel), images)
    pull_kernel = jax.linear_transpose(lambda kernel: convolve(plan, images, kernel), kernel)
    return *pull_images(cotangent), *pull_kernel(cotangent)


def _compute_input_grad(plan: Plan, kernel: Array, cotangent: Array) -> Array:
    if not plan.input_grad.is_default:
        return plan.input_grad(kernel, cotangent)
    window = plan.forward.problem.window
    return conv2d_input_grad.convolution(window, XLA_CONVOLUTION, kernel, cotangent)


def _compute_weight_grad(plan: Plan, images: Array, cotangent: Array) -> Array:
    if not plan.weight_grad.is_default:
        return plan.weight_grad(images, cotangent)
    window = plan.forward.problem.window
    # For a kernel of one pixel, a matrix product is about 3 times as fast, with the same result.
    is_pointwise = window.is_pointwise
    formula = conv2d_weight_grad.per_tap_matmul if is_pointwise else conv2d_weight_grad.convolution
    return formula(window, XLA_CONVOLUTION, images, cotangent)
