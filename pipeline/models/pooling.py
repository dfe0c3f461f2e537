"""Max pooling whose gradient is fast on XLA:CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
from jax import Array

from pipeline.models.lowerings import pooling
from pipeline.models.lowerings.candidates import compute
from pipeline.models.lowerings.lowering import DEFAULT, DEFAULTS, Chooser, Lowering, Role
from pipeline.models.lowerings.problems import PoolingProblem
from pipeline.models.lowerings.window import Pair


def pool_max(
    images: Array,
    window: Pair,
    strides: Pair,
    pads: tuple[Pair, Pair],
    chooser: Chooser = DEFAULTS,
) -> Array:
    """Largest value of every window of images (batch, height, width, channels).

    `pads` go (before, after) height and width, and never win. Tied values share the gradient, so
    that its sum is preserved. `chooser` says how it and its gradient are computed; what was chosen
    is differentiable in reverse mode only.
    """

    def chosen(role: Role) -> _Choice:
        problem = PoolingProblem(role, images.shape, window, strides, pads, str(images.dtype))
        return _Choice(problem, chooser.choose(problem))

    forward, gradient = chosen("forward"), chosen("images_gradient")
    if forward.how == gradient.how == DEFAULT:
        return max_pool(images, window, strides, pads)
    return _pool((forward, gradient), images)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def max_pool(images: Array, window: Pair, strides: Pair, pads: tuple[Pair, Pair]) -> Array:
    """The default: one axis after the other, and what jax derives of that.

    With its gradient this takes 3 ms for 2x2/2 of 64x32x32x64 and 16 ms for 3x3/2 of 8x112x112x64,
    where the gradient of `lax.reduce_window` takes 25 and 66 ms on two cores.

    Jitted so that it keeps its name in a trace, where the emulated device looks for it.
    """
    return pooling.by_axes(images, window, strides, pads)


@dataclass(frozen=True)
class _Choice:
    problem: PoolingProblem
    how: Lowering

    def __call__(self, *operands: Array) -> Array:
        how = Lowering("axes") if self.how == DEFAULT else self.how
        return compute(self.problem, how, *operands)


_Plan = tuple[_Choice, _Choice]
"""Of the maxima and of their gradient."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pool(plan: _Plan, images: Array) -> Array:
    return plan[0](images)


def _forward(plan: _Plan, images: Array) -> tuple[Array, Array]:
    return _pool(plan, images), images


def _backward(plan: _Plan, images: Array, cotangent: Array) -> tuple[Array]:
    return (plan[1](images, cotangent),)


_pool.defvjp(_forward, _backward)
