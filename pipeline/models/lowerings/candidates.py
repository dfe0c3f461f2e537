"""The lowerings that can compute a problem, their formulas, and their choice for a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from jax import Array

from pipeline.core.files.name_text import show_name
from pipeline.models.lowerings.formulas import (
    conv2d_forward,
    conv2d_input_grad,
    conv2d_weight_grad,
    winograd,
)
from pipeline.models.lowerings.formulas.matmuls import PRODUCTS
from pipeline.models.lowerings.formulas.pools import POOLINGS
from pipeline.models.lowerings.problem import (
    CODE_NAMES,
    DEFAULT,
    ROLES,
    WIDENED,
    ConvolutionProblem,
    Engine,
    Formula,
    Lowering,
    LoweringPolicy,
    Problem,
    Role,
)

MAX_PATCH_CHANNELS = 32
"""Most channels for which im2col is tried: its patches have a copy of each for every kernel
position."""
MAX_SUM_CHANNELS = 4
MAX_SUM_TERMS = 150
"""Most channels and most terms of a sum of shifted images. More terms take long to compile."""

Fits = Callable[[ConvolutionProblem], bool]
CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of images that formulas compute at a time."""

CHUNK_BYTES = range(128 << 10, 16 << 20)
"""Sizes of a chunk. Smaller chunks need too many calls; larger chunks exceed the caches."""


def _is_ungrouped(problem: ConvolutionProblem) -> bool:
    return problem.window.groups == 1


def _has_small_patches(problem: ConvolutionProblem) -> bool:
    has_few_channels = problem.channels <= MAX_PATCH_CHANNELS
    return _is_ungrouped(problem) and problem.window.kernel != (1, 1) and has_few_channels


def _is_pointwise(problem: ConvolutionProblem) -> bool:
    return problem.window.is_pointwise


def _has_few_terms(problem: ConvolutionProblem) -> bool:
    """Whether each sum over kernel positions and channels of a group is short."""
    num_summed = problem.features if problem.role == "input_grad" else problem.channels
    channels = num_summed // problem.window.groups
    height, width = problem.window.kernel
    return channels <= MAX_SUM_CHANNELS and height * width * channels <= MAX_SUM_TERMS


def _has_phases(problem: ConvolutionProblem) -> bool:
    """Whether `phases` can compute the problem: there is a stride, no dilation, no negative pad."""
    window = problem.window
    is_uncropped = min(*window.pads[0], *window.pads[1]) >= 0
    return window.dilation == (1, 1) and window.strides != (1, 1) and is_uncropped


def _fits_winograd(problem: ConvolutionProblem) -> bool:
    window = problem.window
    is_plain = window.strides == window.dilation == (1, 1) and window.groups == 1
    return is_plain and window.kernel == (3, 3)


def _fits_exact_winograd(problem: ConvolutionProblem) -> bool:
    """Whether Winograd's tiles fit, and the sums before the products are exact: not in bfloat16."""
    return _fits_winograd(problem) and problem.dtype in ("float32", *WIDENED)


def _define(compute: Callable[..., Array], **settings: Any) -> Formula:
    """Return a formula with these fields, which passes only the problem's window to `compute`."""
    return Formula(lambda problem, *arguments: compute(problem.window, *arguments), **settings)


def _make_winograd(compute: Callable[..., Array], fits: Fits) -> dict[str, Formula]:
    """Return the formulas of both sizes of tiles by name; `compute` begins with the size."""
    return {
        f"winograd{tile}": _define(partial(compute, tile), fits=fits, chunked=True)
        for tile in (2, 4)
    }


CONVOLUTIONS: Mapping[Role, Mapping[str, Formula]] = {
    "forward": {
        "convolution": _define(conv2d_forward.convolution),
        "im2col": _define(conv2d_forward.im2col, fits=_has_small_patches, chunked=True),
        "pointwise": _define(conv2d_forward.pointwise, fits=_is_pointwise),
        "shifted_sum": _define(conv2d_forward.shifted_sum, fits=_has_few_terms, engines=("xla",)),
        **_make_winograd(winograd.forward, _fits_exact_winograd),
    },
    "input_grad": {
        "convolution": _define(conv2d_input_grad.convolution),
        "phases": _define(conv2d_input_grad.phases, fits=_has_phases),
        "pointwise": _define(conv2d_input_grad.pointwise, fits=_is_pointwise),
        "shifted_sum": _define(
            conv2d_input_grad.shifted_sum, fits=_has_few_terms, engines=("xla",)
        ),
        **_make_winograd(winograd.input_grad, _fits_exact_winograd),
    },
    "weight_grad": {
        "convolution": _define(conv2d_weight_grad.convolution, chunked=True),
        "per_tap_matmul": _define(
            conv2d_weight_grad.per_tap_matmul, fits=_is_ungrouped, chunked=True
        ),
        "im2col": _define(conv2d_weight_grad.im2col, fits=_has_small_patches, chunked=True),
        "grouped_as_dense": _define(
            conv2d_weight_grad.grouped_as_dense,
            fits=lambda problem: not _is_ungrouped(problem),
            chunked=True,
        ),
        **_make_winograd(winograd.weight_grad, _fits_winograd),
    },
}
"""Formulas by role and name. The first of a role, by XLA on all images at once, always works."""

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
