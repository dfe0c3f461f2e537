"""The product of a dense layer: the fastest lowering for each of its three computations."""

from __future__ import annotations

import functools
from math import prod

import jax
from jax import Array, lax

from pipeline.models.lowerings.candidates import ChosenLowering, LayerPlan, plan_layer
from pipeline.models.lowerings.problem.lowering import DEFAULTS, Lowering, LoweringPolicy, Role
from pipeline.models.lowerings.problem.problems import DenseProblem

FEW_FEATURES = 100
"""With at most this many features the kernel's default gradient is computed transposed. XLA:CPU's
library is slow for products with few columns. Measured in a loop on 2 cores, float32,
microseconds (batch, inputs, features): 64, 512, 10: 96 -> 10; 128, 512, 32: 113 -> 51; 128, 512,
100: 321 -> 149; 32, 400, 120: 40 -> 44; 64, 784, 512: 272 -> 310."""


def multiply_dense(inputs: Array, kernel: Array, policy: LoweringPolicy = DEFAULTS) -> Array:
    """Multiply inputs (..., channels) by a kernel (channels, features), as `policy` chooses.
    Forward-mode differentiation isn't supported if the policy chooses a lowering for the product or
    for a gradient, or if the inputs are a matrix with at most `FEW_FEATURES` features."""
    channels, features = kernel.shape

    def make_problem(role: Role) -> DenseProblem:
        batch = prod(inputs.shape[:-1])
        return DenseProblem(role, batch, channels, features, str(inputs.dtype))

    plan = plan_layer(policy, make_problem)
    is_transposed = inputs.ndim == 2 and features <= FEW_FEATURES
    if inputs.dtype != kernel.dtype or (plan.is_default and not is_transposed):
        return lax.dot_general(inputs, kernel, (((inputs.ndim - 1,), (0,)), ((), ())))
    rows = inputs.reshape(-1, inputs.shape[-1])
    return _differentiable_product(plan, rows, kernel).reshape(*inputs.shape[:-1], -1)


_Plan = LayerPlan[DenseProblem]


def _multiply(plan: _Plan, inputs: Array, kernel: Array) -> Array:
    return lax.dot(inputs, kernel) if plan.forward.is_default else plan.forward(inputs, kernel)


_differentiable_product = jax.custom_vjp(_multiply, nondiff_argnums=(0,))


def _backward(plan: _Plan, operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
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
    _backward,
)


def _derive_gradient(shape: tuple[int, ...], inputs: Array, cotangent: Array) -> Array:
    kernel = jax.ShapeDtypeStruct(shape, inputs.dtype)
    (gradient,) = jax.linear_transpose(lambda kernel: lax.dot(inputs, kernel), kernel)(cotangent)
    return gradient
