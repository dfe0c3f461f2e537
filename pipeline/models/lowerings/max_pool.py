"""Max pooling whose gradient is fast on XLA:CPU."""

from __future__ import annotations

import functools

import jax
from jax import Array

from pipeline.models.lowerings.candidates import ChosenLowering
from pipeline.models.lowerings.formulas import max_pools
from pipeline.models.lowerings.problem.conv_window import Pair
from pipeline.models.lowerings.problem.lowering import DEFAULTS, Lowering, LoweringPolicy, Role
from pipeline.models.lowerings.problem.problems import PoolingProblem


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
    return max_pools.pool_axes(images, window, strides, pads)


_Plan = tuple[ChosenLowering[PoolingProblem], ChosenLowering[PoolingProblem]]
"""Choices for the maxima and for their gradient."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pool(plan: _Plan, images: Array) -> Array:
    return plan[0](images)


_pool.defvjp(
    lambda plan, images: (_pool(plan, images), images),
    lambda plan, images, cotangent: (plan[1](images, cotangent),),
)
