"""The lowerings of a layer's computations, as a policy chooses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from jax import Array

from pipeline.models.lowerings.candidates import compute
from pipeline.models.lowerings.problem.lowering import (
    DEFAULT,
    ROLES,
    Lowering,
    LoweringPolicy,
    Problem,
    Role,
)

P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class ChosenLowering(Generic[P]):
    """A problem and its lowering. Call it with the operands for the result."""

    problem: P
    lowering: Lowering

    def __call__(self, *operands: Array) -> Array:
        return compute(self.problem, self.lowering, operands)

    @property
    def is_default(self) -> bool:
        """Whether nothing was chosen."""
        return self.lowering == DEFAULT


@dataclass(frozen=True)
class LayerPlan(Generic[P]):
    """Lowerings of a layer with weights: of its result and of its two gradients."""

    forward: ChosenLowering[P]
    input_grad: ChosenLowering[P]
    weight_grad: ChosenLowering[P]

    @property
    def is_default(self) -> bool:
        """Whether nothing was chosen for any of the three."""
        return (
            self.forward.is_default and self.input_grad.is_default and self.weight_grad.is_default
        )


def plan_layer(policy: LoweringPolicy, make_problem: Callable[[Role], P]) -> LayerPlan[P]:
    """Let a policy choose the lowering of each role's problem."""
    problems = map(make_problem, ROLES)
    return LayerPlan(*(ChosenLowering(problem, policy.choose(problem)) for problem in problems))
