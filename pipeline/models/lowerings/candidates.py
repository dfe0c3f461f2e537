"""Which lowerings there are for a problem, and how each is carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jax import Array

from pipeline.models.lowerings import forward, images_gradient, kernel_gradient, winograd
from pipeline.models.lowerings.lowering import WIDENED, Engine, Lowering, Problem, Role
from pipeline.models.lowerings.window import Window

Compute = Callable[[Window, Lowering, Array, Array], Array]

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Images at a time, where a family can take them so."""

CHUNK_BYTES = range(128 << 10, 16 << 20)
"""What the images of a chunk may take: less is all calls, more leaves every cache."""

PATCHED_CHANNELS = 32
FEW_CHANNELS, MOST_TERMS = 4, 150
"""Up to these, a convolution is tried as a sum of shifted images: more terms compile for long."""


@dataclass(frozen=True)
class Family:
    """A formula, the problems that it is for, and what may be varied."""

    compute: Compute
    fits: Callable[[Problem], bool]
    engines: tuple[Engine, ...] = ("xla", "onednn")
    chunked: bool = False


def _any(problem: Problem) -> bool:
    return True


def _ungrouped(problem: Problem) -> bool:
    return problem.window.groups == 1


def _narrow(problem: Problem) -> bool:
    """Patches of many channels are too much to write and read again."""
    wider_than_a_pixel = problem.window.kernel != (1, 1)
    return _ungrouped(problem) and wider_than_a_pixel and problem.channels <= PATCHED_CHANNELS


def _pointwise(problem: Problem) -> bool:
    return problem.window.is_pointwise


def _few_terms(problem: Problem) -> bool:
    """Of each sum over positions in the kernel and channels, of a group if there are groups."""
    summed = problem.features if problem.role == "images_gradient" else problem.channels
    channels, (height, width) = summed // problem.window.groups, problem.window.kernel
    return channels <= FEW_CHANNELS and height * width * channels <= MOST_TERMS


def _grouped(problem: Problem) -> bool:
    return problem.window.groups > 1


def _strided(problem: Problem) -> bool:
    window = problem.window
    return (
        window.dilation == (1, 1)
        and window.strides != (1, 1)
        and min(*window.pads[0], *window.pads[1]) >= 0
    )


def _three_by_three(problem: Problem) -> bool:
    window = problem.window
    plain = window.strides == window.dilation == (1, 1) and window.groups == 1
    return plain and window.kernel == (3, 3)


def _in_float32(problem: Problem) -> bool:
    """The sums before the products would lose digits of bfloat16."""
    return _three_by_three(problem) and problem.dtype in ("float32", *WIDENED)


def _tiled(compute: Compute) -> Family:
    return Family(compute, _in_float32, chunked=True)


def _tiled_sum(compute: Compute) -> Family:
    return Family(compute, _three_by_three, chunked=True)


FAMILIES: Mapping[Role, Mapping[str, Family]] = {
    "forward": {
        "convolution": Family(forward.by_convolution, _any),
        "patches": Family(forward.by_patches, _narrow, chunked=True),
        "pixels": Family(forward.by_pixels, _pointwise),
        "multiply_adds": Family(forward.by_multiply_adds, _few_terms, engines=("xla",)),
        "winograd2": _tiled(winograd.forward_by_tiles(2)),
        "winograd4": _tiled(winograd.forward_by_tiles(4)),
    },
    "images_gradient": {
        "convolution": Family(images_gradient.by_convolution, _any),
        "phases": Family(images_gradient.by_phases, _strided),
        "pixels": Family(images_gradient.by_pixels, _pointwise),
        "multiply_adds": Family(images_gradient.by_multiply_adds, _few_terms, engines=("xla",)),
        "winograd2": _tiled(winograd.images_gradient_by_tiles(2)),
        "winograd4": _tiled(winograd.images_gradient_by_tiles(4)),
    },
    "kernel_gradient": {
        "convolution": Family(kernel_gradient.by_convolution, _any, chunked=True),
        "positions": Family(kernel_gradient.by_positions, _ungrouped, chunked=True),
        "patches": Family(kernel_gradient.by_patches, _narrow, chunked=True),
        "blocks": Family(kernel_gradient.by_blocks, _grouped, chunked=True),
        "winograd2": _tiled_sum(winograd.kernel_gradient_by_tiles(2)),
        "winograd4": _tiled_sum(winograd.kernel_gradient_by_tiles(4)),
    },
}
"""By role and name. The first of each role, by XLA and all images at once, always works."""


def candidates(problem: Problem, engines: frozenset[Engine]) -> tuple[Lowering, ...]:
    """All lowerings of a problem that the engines at hand can carry out, the plain one first."""
    ways = (
        Lowering(name, engine, images)
        for name, family in FAMILIES[problem.role].items()
        for engine in family.engines
        for images in (None, *CHUNKS)
    )
    return tuple(
        way for way in ways if can_compute(problem, way, engines) and _is_worth_trying(problem, way)
    )


def _is_worth_trying(problem: Problem, way: Lowering) -> bool:
    """Whether its chunks, where it takes some, are less than all and of a good size."""
    if way.images is None or (way.images == 1 < problem.batch and problem.is_depthwise):
        return True
    height, width = problem.window.sizes
    chunk_bytes = way.images * height * width * problem.channels * problem.itemsize
    return way.images < problem.batch and chunk_bytes in CHUNK_BYTES


def can_compute(problem: Problem, how: Lowering, engines: frozenset[Engine]) -> bool:
    """Whether a lowering is one for a problem, with the engines at hand."""
    family = FAMILIES[problem.role].get(how.family)
    if family is None or not family.fits(problem) or how.engine not in family.engines:
        return False
    if how.engine not in engines:
        return False
    if how.images is None:
        return True
    divides = how.images <= problem.batch and problem.batch % how.images == 0
    return family.chunked and divides


def compute(problem: Problem, how: Lowering, first: Array, second: Array) -> Array:
    """Carry a lowering out on the operands of its role.

    Raises ValueError where the problem is not one that the lowering is for.
    """
    if not can_compute(problem, how, frozenset((how.engine,))):
        raise ValueError(f"{how} can't compute {problem}")
    family, dtype = FAMILIES[problem.role][how.family], WIDENED.get(problem.dtype, problem.dtype)
    result = family.compute(problem.window, how, first.astype(dtype), second.astype(dtype))
    return result.astype(problem.dtype)
