"""The formulas of convolutions, by role and name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax import Array

from pipeline.models.lowerings.formulas import (
    conv2d_forward,
    conv2d_input_grad,
    conv2d_weight_grad,
    winograd,
)
from pipeline.models.lowerings.problem.conv_window import ConvWindow
from pipeline.models.lowerings.problem.formula import Formula, always
from pipeline.models.lowerings.problem.lowering import WIDENED, Engine, Lowering, Role
from pipeline.models.lowerings.problem.problems import ConvolutionProblem

MAX_PATCH_CHANNELS = 32
MAX_SUM_CHANNELS, MAX_SUM_TERMS = 4, 150
"""Limits up to which a sum of shifted images is tried; more terms take long to compile."""

Slide = Callable[[ConvWindow, Lowering, Array, Array], Array]


def _ungrouped(problem: ConvolutionProblem) -> bool:
    return problem.window.groups == 1


def _narrow(problem: ConvolutionProblem) -> bool:
    """Whether patches are worth writing: those of many channels are too large."""
    wider_than_a_pixel = problem.window.kernel != (1, 1)
    return _ungrouped(problem) and wider_than_a_pixel and problem.channels <= MAX_PATCH_CHANNELS


def _pointwise(problem: ConvolutionProblem) -> bool:
    return problem.window.is_pointwise


def _few_terms(problem: ConvolutionProblem) -> bool:
    """Whether each sum over kernel positions and channels (of a group) is short."""
    summed = problem.features if problem.role == "images_gradient" else problem.channels
    channels, (height, width) = summed // problem.window.groups, problem.window.kernel
    return channels <= MAX_SUM_CHANNELS and height * width * channels <= MAX_SUM_TERMS


def _grouped(problem: ConvolutionProblem) -> bool:
    return problem.window.groups > 1


def _strided(problem: ConvolutionProblem) -> bool:
    window = problem.window
    return (
        window.dilation == (1, 1)
        and window.strides != (1, 1)
        and min(*window.pads[0], *window.pads[1]) >= 0
    )


def _three_by_three(problem: ConvolutionProblem) -> bool:
    window = problem.window
    plain = window.strides == window.dilation == (1, 1) and window.groups == 1
    return plain and window.kernel == (3, 3)


def _in_float32(problem: ConvolutionProblem) -> bool:
    """Whether the sums before the products are exact enough: bfloat16 would lose digits."""
    return _three_by_three(problem) and problem.dtype in ("float32", *WIDENED)


def _formula(
    slide: Slide,
    fits: Callable[[ConvolutionProblem], bool] = always,
    engines: tuple[Engine, ...] = ("xla", "onednn"),
    chunked: bool = False,
) -> Formula:
    def compute(
        problem: ConvolutionProblem, lowering: Lowering, first: Array, second: Array
    ) -> Array:
        return slide(problem.window, lowering, first, second)

    return Formula(compute, fits, engines, chunked)


def _tiled(slide: Slide) -> Formula:
    return _formula(slide, _in_float32, chunked=True)


def _tiled_sum(slide: Slide) -> Formula:
    return _formula(slide, _three_by_three, chunked=True)


CONVOLUTIONS: Mapping[Role, Mapping[str, Formula]] = {
    "forward": {
        "convolution": _formula(conv2d_forward.by_convolution),
        "patches": _formula(conv2d_forward.im2col, _narrow, chunked=True),
        "pixels": _formula(conv2d_forward.pointwise, _pointwise),
        "multiply_adds": _formula(conv2d_forward.shifted_sum, _few_terms, engines=("xla",)),
        "winograd2": _tiled(winograd.forward_by_tiles(2)),
        "winograd4": _tiled(winograd.forward_by_tiles(4)),
    },
    "images_gradient": {
        "convolution": _formula(conv2d_input_grad.by_convolution),
        "phases": _formula(conv2d_input_grad.by_phases, _strided),
        "pixels": _formula(conv2d_input_grad.pointwise, _pointwise),
        "multiply_adds": _formula(conv2d_input_grad.shifted_sum, _few_terms, engines=("xla",)),
        "winograd2": _tiled(winograd.input_grad_by_tiles(2)),
        "winograd4": _tiled(winograd.input_grad_by_tiles(4)),
    },
    "kernel_gradient": {
        "convolution": _formula(conv2d_weight_grad.by_convolution, chunked=True),
        "positions": _formula(conv2d_weight_grad.per_tap_matmul, _ungrouped, chunked=True),
        "patches": _formula(conv2d_weight_grad.im2col, _narrow, chunked=True),
        "blocks": _formula(conv2d_weight_grad.grouped_as_dense, _grouped, chunked=True),
        "winograd2": _tiled_sum(winograd.weight_grad_by_tiles(2)),
        "winograd4": _tiled_sum(winograd.weight_grad_by_tiles(4)),
    },
}
"""The first of each role, by XLA and all images at once, always works."""
