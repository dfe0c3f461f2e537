"""The lowerings that can compute a problem, their computation, and their choice for a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from jax import Array

from pipeline.core.files.name_text import show_name
from pipeline.models.lowerings.conv2d_formulas import CONVOLUTIONS
from pipeline.models.lowerings.formulas.dense_matmuls import PRODUCTS
from pipeline.models.lowerings.formulas.max_pools import POOLINGS
from pipeline.models.lowerings.problem.lowering import (
    CODE_NAMES,
    DEFAULT,
    ROLES,
    WIDENED,
    Engine,
    Formula,
    Lowering,
    LoweringPolicy,
    Role,
)
from pipeline.models.lowerings.problem.problems import ConvolutionProblem, Problem

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of images that formulas compute at a time."""

CHUNK_BYTES = range(128 << 10, 16 << 20)
"""Sizes of a chunk. Smaller chunks need too many calls; larger chunks exceed the caches."""

FORMULAS: Mapping[str, Mapping[Role, Mapping[str, Formula]]] = {
    "conv2d": CONVOLUTIONS,
    "dense": PRODUCTS,
    "max_pool": POOLINGS,
}
"""Formulas by kind of problem, role and name."""


def list_candidates(problem: Problem, engines: frozenset[Engine]) -> tuple[Lowering, ...]:
    """Return a problem's lowerings with these engines. The first is the role's first formula by
    XLA."""
    lowerings = (
        Lowering(name, engine, images)
        for name, formula in FORMULAS[problem.kind][problem.role].items()
        for engine in formula.engines
        for images in (None, *CHUNKS)
    )
    return tuple(
        lowering
        for lowering in lowerings
        if can_compute(problem, lowering, engines) and _is_worth_trying(problem, lowering)
    )


def _is_worth_trying(problem: Problem, lowering: Lowering) -> bool:
    """Whether chunks, if any, are smaller than the batch and in `CHUNK_BYTES`."""
    images = lowering.images
    if images is None:
        return True
    is_depthwise = isinstance(problem, ConvolutionProblem) and problem.is_depthwise
    # oneDNN's weight gradient stays depthwise only with one image at a time.
    stays_depthwise = images == 1 and is_depthwise
    fits_caches = images * problem.sample_bytes in CHUNK_BYTES
    return images < problem.batch and (stays_depthwise or fits_caches)


def require_formula(problem: str, lowering: Lowering) -> None:
    """Raise ValueError if a lowering from a file isn't one of a problem, as text, of its kind."""
    kind, role, *_ = [*problem.split(" "), ""]
    roles: Mapping[str, Mapping[str, Formula]] = dict(FORMULAS.get(kind, {}).items())
    formulas = roles.get(CODE_NAMES.get(role, role))
    if formulas is None:
        raise ValueError(f"{show_name(problem)} isn't a computation, such as dense forward")
    if lowering == DEFAULT:
        return
    formula = formulas.get(lowering.family)
    is_known = formula is not None and lowering.engine in formula.engines
    if formula is None or not is_known or (lowering.images is not None and not formula.chunked):
        raise ValueError(f"{show_name(str(lowering))} isn't a lowering of {kind} {role}")


def can_compute(problem: Problem, lowering: Lowering, engines: frozenset[Engine]) -> bool:
    """Whether a lowering can compute a problem with these engines."""
    formula = FORMULAS[problem.kind][problem.role].get(lowering.family)
    if formula is None or not formula.fits(problem):
        return False
    if lowering.engine not in engines.intersection(formula.engines):
        return False
    if lowering.images is None:
        return True
    return formula.chunked and problem.batch > 0 and problem.batch % lowering.images == 0


def compute(problem: Problem, lowering: Lowering, operands: Sequence[Array]) -> Array:
    """Compute a problem by a lowering, on the operands of its role. The result has the operands'
    dtype. Raises ValueError if the lowering can't compute it."""
    if not can_compute(problem, lowering, frozenset((lowering.engine,))):
        raise ValueError(f"{lowering} can't compute {problem}")
    formula = FORMULAS[problem.kind][problem.role][lowering.family]
    dtype = WIDENED.get(problem.dtype, problem.dtype)
    result = formula.compute(problem, lowering, *(operand.astype(dtype) for operand in operands))
    return result.astype(problem.dtype)


P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class ChosenLowering(Generic[P]):
    """A problem and its lowering; a call with the operands returns the result."""

    problem: P
    lowering: Lowering

    def __call__(self, *operands: Array) -> Array:
        return compute(self.problem, self.lowering, operands)

    @property
    def is_default(self) -> bool:
        return self.lowering == DEFAULT


@dataclass(frozen=True)
class LayerPlan(Generic[P]):
    """Lowerings of a layer with weights: of its result and its two gradients."""

    forward: ChosenLowering[P]
    input_grad: ChosenLowering[P]
    weight_grad: ChosenLowering[P]

    @property
    def is_default(self) -> bool:
        choices = (self.forward, self.input_grad, self.weight_grad)
        return all(choice.is_default for choice in choices)


def plan_layer(policy: LoweringPolicy, make_problem: Callable[[Role], P]) -> LayerPlan[P]:
    """Return the lowerings that a policy chooses for the problems of all roles."""
    problems = map(make_problem, ROLES)
    return LayerPlan(*(ChosenLowering(problem, policy.choose(problem)) for problem in problems))
