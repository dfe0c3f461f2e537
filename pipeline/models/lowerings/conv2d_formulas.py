"""The formulas of convolutions, by role and name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jax import Array

from pipeline.models.lowerings.formulas import (
    conv2d_forward,
    conv2d_input_grad,
    conv2d_weight_grad,
    winograd,
)
from pipeline.models.lowerings.problem.lowering import WIDENED, Formula, Role
from pipeline.models.lowerings.problem.problems import ConvolutionProblem

MAX_PATCH_CHANNELS = 32
"""Most channels for which im2col is tried: its patches have a copy of each for every kernel
position."""
MAX_SUM_CHANNELS = 4
MAX_SUM_TERMS = 150
"""Most channels and most terms of a sum of shifted images. More terms take long to compile."""

Fits = Callable[[ConvolutionProblem], bool]


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
