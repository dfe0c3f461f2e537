"""Layers by their fastest lowerings: convolution in two dimensions, dense product, max pooling.

Each of the three computations of a layer has its lowering: the result, and the gradients by its
input and its kernel. The gradient of max pooling is fast on XLA:CPU.

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
from math import prod

import jax
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata

from pipeline.models.lowerings.candidates import ChosenLowering, LayerPlan, plan_layer
from pipeline.models.lowerings.formulas import (
    conv2d_forward,
    conv2d_input_grad,
    conv2d_weight_grad,
    pools,
)
from pipeline.models.lowerings.problem import (
    DEFAULTS,
    ConvolutionProblem,
    DenseProblem,
    Lowering,
    LoweringPolicy,
    Pair,
    PoolingProblem,
    Role,
    make_convolution_problem,
    make_window,
)

XLA_CONVOLUTION = Lowering("convolution")
FEW_FEATURES = 100
"""With at most this many features the kernel's default gradient is computed transposed. XLA:CPU's
library is slow for products with few columns. Measured in a loop on 2 cores, float32,
microseconds (batch, inputs, features): 64, 512, 10: 96 -> 10; 128, 512, 32: 113 -> 51; 128, 512,
100: 321 -> 149; 32, 400, 120: 40 -> 44; 64, 784, 512: 272 -> 310."""


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


def _backward_conv2d(plan: Plan, operands: _Operands, cotangent: Array) -> _Operands:
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
    _backward_conv2d,
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


def multiply_dense(inputs: Array, kernel: Array, policy: LoweringPolicy = DEFAULTS) -> Array:
    """Multiply inputs (..., channels) by a kernel (channels, features), as `policy` chooses.
    Forward-mode differentiation isn't supported if the policy chooses a lowering for the product or
    for a gradient, or if the inputs are a matrix with at most `FEW_FEATURES` features."""
    channels, features = kernel.shape
    rows = prod(inputs.shape[:-1])

    def make_problem(role: Role) -> DenseProblem:
        return DenseProblem(role, rows, channels, features, str(inputs.dtype))

    plan = plan_layer(policy, make_problem)
    is_transposed = inputs.ndim == 2 and features <= FEW_FEATURES
    if inputs.dtype != kernel.dtype or (plan.is_default and not is_transposed):
        return lax.dot_general(inputs, kernel, (((inputs.ndim - 1,), (0,)), ((), ())))
    product = _differentiable_product(plan, inputs.reshape(rows, channels), kernel)
    return product.reshape(*inputs.shape[:-1], features)


_DensePlan = LayerPlan[DenseProblem]


def _multiply(plan: _DensePlan, inputs: Array, kernel: Array) -> Array:
    return lax.dot(inputs, kernel) if plan.forward.is_default else plan.forward(inputs, kernel)


_differentiable_product = jax.custom_vjp(_multiply, nondiff_argnums=(0,))


def _backward_dense(
    plan: _DensePlan, operands: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    inputs, kernel = operands
    if plan.input_grad.is_default:
        (inputs_grad,) = jax.linear_transpose(lambda x: lax.dot(x, kernel), inputs)(cotangent)
    else:
        inputs_grad = plan.input_grad(kernel, cotangent)
    if not plan.weight_grad.is_default:
        return inputs_grad, plan.weight_grad(inputs, cotangent)
    derive = functools.partial(_derive_gradient, kernel.shape)
    if kernel.shape[1] > FEW_FEATURES:
        return inputs_grad, derive(inputs, cotangent)
    transposed = ChosenLowering(plan.weight_grad.problem, Lowering("transposed"))
    kernel_grad: Array = lax.platform_dependent(inputs, cotangent, cpu=transposed, default=derive)
    return inputs_grad, kernel_grad


_differentiable_product.defvjp(
    lambda plan, inputs, kernel: (_multiply(plan, inputs, kernel), (inputs, kernel)),
    _backward_dense,
)


def _derive_gradient(shape: tuple[int, ...], inputs: Array, cotangent: Array) -> Array:
    kernel = jax.ShapeDtypeStruct(shape, inputs.dtype)
    (gradient,) = jax.linear_transpose(lambda kernel: lax.dot(inputs, kernel), kernel)(cotangent)
    return gradient


def pool_max(
    images: Array,
    window: Pair,
    strides: Pair,
    pads: tuple[Pair, Pair],
    policy: LoweringPolicy = DEFAULTS,
) -> Array:
    """Return the largest value of every window of images (batch, height, width, channels).

    `pads` are (before, after) of height and width; padding is never the maximum. Tied values share
    the gradient, so its sum stays the same. `policy` chooses how the maxima and their gradient are
    computed. With a chosen lowering, forward-mode differentiation isn't supported.
    """
    roles: tuple[Role, Role] = ("forward", "input_grad")
    choices = []
    for role in roles:
        problem = PoolingProblem(role, images.shape, window, strides, pads, str(images.dtype))
        choices.append(ChosenLowering(problem, policy.choose(problem)))
    if all(choice.is_default for choice in choices):
        return max_pool(images, window, strides, pads)
    # If only one has a chosen lowering, the other gets a formula in place of the default: `axes`,
    # which is the same computation.
    forward, gradient = (
        ChosenLowering(choice.problem, Lowering("axes")) if choice.is_default else choice
        for choice in choices
    )
    return _pool((forward, gradient), images)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def max_pool(images: Array, window: Pair, strides: Pair, pads: tuple[Pair, Pair]) -> Array:
    """Compute the default of `pool_max`: `pool_axes`, with the gradient that jax derives.

    With its gradient this takes 3 ms for 2x2/2 of 64x32x32x64 and 16 ms for 3x3/2 of 8x112x112x64
    on two cores. The gradient of `lax.reduce_window` takes 25 and 66 ms.

    It is jitted so that a trace has the name `max_pool`, which the emulated device looks for.
    """
    return pools.pool_axes(images, window, strides, pads)


_PoolingPlan = tuple[ChosenLowering[PoolingProblem], ChosenLowering[PoolingProblem]]
"""Choices for the maxima and for their gradient."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pool(plan: _PoolingPlan, images: Array) -> Array:
    return plan[0](images)


_pool.defvjp(
    lambda plan, images: (_pool(plan, images), images),
    lambda plan, images, cotangent: (plan[1](images, cotangent),),
)
