"""The lowerings that were chosen for a layer's computations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from jax import Array

from pipeline.models.lowerings.candidates import compute
from pipeline.models.lowerings.problem.lowering import DEFAULT, Lowering, Problem

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
        choices = (self.forward, self.input_grad, self.weight_grad)
        return all(choice.is_default for choice in choices)
