"""Which lowerings there are for a problem, and how each is carried out."""

from __future__ import annotations

from collections.abc import Mapping

from jax import Array

from pipeline.lowerings.conv2d_formulas import CONVOLUTIONS
from pipeline.lowerings.formulas.dense_matmuls import PRODUCTS
from pipeline.lowerings.formulas.max_pools import POOLINGS
from pipeline.lowerings.problem.formula import Formula
from pipeline.lowerings.problem.lowering import WIDENED, Engine, Lowering, Problem, Role
from pipeline.lowerings.problem.problems import ConvolutionProblem

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Images at a time, where a family can take them so."""

CHUNK_BYTES = range(128 << 10, 16 << 20)
"""What the images of a chunk may take: less is all calls, more leaves every cache."""

FAMILIES: Mapping[str, Mapping[Role, Mapping[str, Formula]]] = {
    "conv2d": CONVOLUTIONS,
    "dense": PRODUCTS,
    "max_pool": POOLINGS,
}
"""By kind of problem, role and name."""


def candidates(problem: Problem, engines: frozenset[Engine]) -> tuple[Lowering, ...]:
    """All lowerings of a problem that the engines at hand can carry out, the plain one first."""
    ways = (
        Lowering(name, engine, images)
        for name, family in FAMILIES[problem.kind][problem.role].items()
        for engine in family.engines
        for images in (None, *CHUNKS)
    )
    return tuple(
        way for way in ways if can_compute(problem, way, engines) and _is_worth_trying(problem, way)
    )


def _is_worth_trying(problem: Problem, way: Lowering) -> bool:
    """Whether its chunks, where it takes some, are less than all and of a good size."""
    if way.images is None or (way.images == 1 < problem.batch and _is_depthwise(problem)):
        return True
    return way.images < problem.batch and way.images * problem.sample_bytes in CHUNK_BYTES


def _is_depthwise(problem: Problem) -> bool:
    return isinstance(problem, ConvolutionProblem) and problem.is_depthwise


def can_compute(problem: Problem, how: Lowering, engines: frozenset[Engine]) -> bool:
    """Whether a lowering is one for a problem, with the engines at hand."""
    family = FAMILIES[problem.kind][problem.role].get(how.family)
    if family is None or not family.fits(problem) or how.engine not in family.engines:
        return False
    if how.engine not in engines:
        return False
    if how.images is None:
        return True
    divides = how.images <= problem.batch and problem.batch % how.images == 0
    return family.chunked and divides


def compute(problem: Problem, how: Lowering, *operands: Array) -> Array:
    """Carry a lowering out on the operands of its role.

    Raises ValueError where the problem is not one that the lowering is for.
    """
    if not can_compute(problem, how, frozenset((how.engine,))):
        raise ValueError(f"{how} can't compute {problem}")
    family = FAMILIES[problem.kind][problem.role][how.family]
    dtype = WIDENED.get(problem.dtype, problem.dtype)
    result = family.compute(problem, how, *(operand.astype(dtype) for operand in operands))
    return result.astype(problem.dtype)
