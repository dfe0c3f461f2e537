"""What a layer was given for each of its computations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from jax import Array

from pipeline.lowerings.candidates import compute
from pipeline.lowerings.problem.lowering import DEFAULT, Lowering, Problem

P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class Choice(Generic[P]):
    """A problem and the lowering that was chosen for it; called with the operands, the result."""

    problem: P
    how: Lowering

    def __call__(self, *operands: Array) -> Array:
        return compute(self.problem, self.how, *operands)

    @property
    def is_default(self) -> bool:
        """Whether nothing was chosen."""
        return self.how == DEFAULT


@dataclass(frozen=True)
class Plan(Generic[P]):
    """How a layer with weights and its gradients are computed."""

    forward: Choice[P]
    images_gradient: Choice[P]
    kernel_gradient: Choice[P]

    @property
    def is_default(self) -> bool:
        """Whether nothing was chosen for any of the three."""
        choices = (self.forward, self.images_gradient, self.kernel_gradient)
        return all(choice.is_default for choice in choices)
