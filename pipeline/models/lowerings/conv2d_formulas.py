"""The formulas of convolutions, by role and name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from jax import Array

from pipeline.models.lowerings.formulas import (
    conv2d_forward,
    conv2d_input_grad,
    conv2d_weight_grad,
    winograd,
)
from pipeline.models.lowerings.problem.conv_window import ConvWindow
from pipeline.models.lowerings.problem.lowering import WIDENED, Engine, Formula, Lowering, Role
from pipeline.models.lowerings.problem.problems import ConvolutionProblem

MAX_PATCH_CHANNELS = 32
MAX_SUM_CHANNELS = 4
MAX_SUM_TERMS = 150
"""Limits of a sum of shifted images; more terms take long to compile."""

Fits = Callable[[ConvolutionProblem], bool]


def _is_ungrouped(problem: ConvolutionProblem) -> bool:
    return problem.window.groups == 1


def _has_small_patches(problem: ConvolutionProblem) -> bool:
    """Whether the kernel has several pixels and few channels; other patches are too large."""
    is_wide = problem.window.kernel != (1, 1)
    return _is_ungrouped(problem) and is_wide and problem.channels <= MAX_PATCH_CHANNELS


def _is_pointwise(problem: ConvolutionProblem) -> bool:
    return problem.window.is_pointwise


def _has_few_terms(problem: ConvolutionProblem) -> bool:
    """Whether each sum over kernel positions and channels of a group is short."""
    num_summed = problem.features if problem.role == "input_grad" else problem.channels
    channels = num_summed // problem.window.groups
    height, width = problem.window.kernel
    return channels <= MAX_SUM_CHANNELS and height * width * channels <= MAX_SUM_TERMS


def _is_strided(problem: ConvolutionProblem) -> bool:
    window = problem.window
    is_uncropped = min(*window.pads[0], *window.pads[1]) >= 0
    return window.dilation == (1, 1) and window.strides != (1, 1) and is_uncropped


def _is_three_by_three(problem: ConvolutionProblem) -> bool:
    window = problem.window
    is_dense = window.strides == window.dilation == (1, 1) and window.groups == 1
    return is_dense and window.kernel == (3, 3)


def _is_exact_in_tiles(problem: ConvolutionProblem) -> bool:
    """Whether the sums before the products are exact enough; bfloat16 loses digits."""
    return _is_three_by_three(problem) and problem.dtype in ("float32", *WIDENED)


def _define(
    compute: Callable[[ConvWindow, Lowering, Array, Array], Array],
    fits: Fits = lambda problem: True,
    engines: tuple[Engine, ...] = ("xla", "onednn"),
    chunked: bool = False,
) -> Formula:
    def compute_problem(
        problem: ConvolutionProblem, lowering: Lowering, first: Array, second: Array
    ) -> Array:
        return compute(problem.window, lowering, first, second)

    return Formula(compute_problem, fits, engines, chunked)


def _make_winograd(formula: Callable[..., Array], fits: Fits) -> dict[str, Formula]:
    tiles = (2, 4)
    return {
        f"winograd{tile}": _define(partial(formula, tile), fits, chunked=True) for tile in tiles
    }


CONVOLUTIONS: Mapping[Role, Mapping[str, Formula]] = {
    "forward": {
        "convolution": _define(conv2d_forward.convolution),
        "im2col": _define(conv2d_forward.im2col, _has_small_patches, chunked=True),
        "pointwise": _define(conv2d_forward.pointwise, _is_pointwise),
        "shifted_sum": _define(conv2d_forward.shifted_sum, _has_few_terms, engines=("xla",)),
        **_make_winograd(winograd.forward, _is_exact_in_tiles),
    },
    "input_grad": {
        "convolution": _define(conv2d_input_grad.convolution),
        "phases": _define(conv2d_input_grad.phases, _is_strided),
        "pointwise": _define(conv2d_input_grad.pointwise, _is_pointwise),
        "shifted_sum": _define(conv2d_input_grad.shifted_sum, _has_few_terms, engines=("xla",)),
        **_make_winograd(winograd.input_grad, _is_exact_in_tiles),
    },
    "weight_grad": {
        "convolution": _define(conv2d_weight_grad.convolution, chunked=True),
        "per_tap_matmul": _define(conv2d_weight_grad.per_tap_matmul, _is_ungrouped, chunked=True),
        "im2col": _define(conv2d_weight_grad.im2col, _has_small_patches, chunked=True),
        "grouped_as_dense": _define(
            conv2d_weight_grad.grouped_as_dense,
            lambda problem: not _is_ungrouped(problem),
            chunked=True,
        ),
        **_make_winograd(winograd.weight_grad, _is_three_by_three),
    },
}
"""Formulas by role and name. The first of a role, by XLA on all images at once, always works."""
