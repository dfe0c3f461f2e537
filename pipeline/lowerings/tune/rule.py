"""What to take for shapes that no bank knows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pipeline.lowerings.candidates import can_compute, candidates
from pipeline.lowerings.problem.lowering import DEFAULT, Engine, Lowering, Problem, Role
from pipeline.lowerings.problem.problems import ConvolutionProblem

LARGE_FLOPS = 50_000_000
"""From here on a convolution is worth a library call of its own."""

LARGE_GROUPED_FLOPS = 2_000_000
"""The same for one in groups, which XLA computes a value at a time, 20 to 50 times as slowly."""

MIN_FEATURES, MIN_TERMS = 16, 64
"""Below, oneDNN fills its vectors with zeros: features, and terms of the sum that one result is."""

CHUNK_BYTES = 1 << 20
"""About what of the cotangent should be looked at at once: half of a core's L2 cache."""

GROUPED_IMAGES = 4
"""Images at a time for the gradient of a kernel in groups."""

MIN_TILED = 7
"""Results a side from which Winograd's tiles of 4 x 4 are full enough to win."""

PREFERRED: Mapping[Role, Sequence[str]] = {
    "forward": ("winograd4", "convolution"),
    "images_gradient": ("winograd4", "phases", "convolution"),
    "kernel_gradient": ("winograd4", "convolution"),
}
POINTWISE: Mapping[Role, str] = {
    "forward": "convolution",
    "images_gradient": "pixels",
    "kernel_gradient": "positions",
}
"""Families by role; the first that fits the problem, and the one for kernels of one pixel."""


def is_worth_a_call(problem: Problem) -> bool:
    """Whether a problem is a convolution, large, and has channels enough, for oneDNN."""
    if not isinstance(problem, ConvolutionProblem):
        return False
    height, width = problem.window.kernel
    if problem.window.groups > 1:
        return problem.features >= MIN_FEATURES and problem.flops >= LARGE_GROUPED_FLOPS
    wide = problem.features >= MIN_FEATURES and problem.channels * height * width >= MIN_TERMS
    return wide and problem.flops >= LARGE_FLOPS


def usual_lowering(problem: Problem, engines: frozenset[Engine]) -> Lowering:
    """What the tuner found on AVX-512 for the shapes of residual networks, as a rule.

    For what is large and has channels enough, Winograd's tiles or oneDNN's convolution, and one
    product of matrices for the gradients of kernels of one pixel; else the default.
    """
    if not isinstance(problem, ConvolutionProblem):
        return DEFAULT
    called = "onednn" in engines and is_worth_a_call(problem)
    if problem.window.groups > 1:
        return _by_groups(problem) if called else _by_xla(problem)
    if not called:
        return DEFAULT
    if problem.window.is_pointwise:
        return Lowering(POINTWISE[problem.role], "onednn")
    ways = [way for way in candidates(problem, engines) if way.engine == "onednn"]
    for family in PREFERRED[problem.role]:
        fitting = [way for way in ways if way.family == family and _is_tiled_well(way, problem)]
        if fitting:
            return min(
                fitting, key=lambda way: abs((way.images or problem.batch) - _chunk(problem))
            )
    return DEFAULT


def _by_groups(problem: ConvolutionProblem) -> Lowering:
    """oneDNN's convolution. The kernel's gradient has the images of a chunk as channels of each
    group: one at a time is a depthwise convolution again where this was one."""
    if problem.role != "kernel_gradient":
        return Lowering("convolution", "onednn")
    images = 1 if problem.is_depthwise else math.gcd(problem.batch, GROUPED_IMAGES)
    return Lowering("convolution", "onednn", images)


def _by_xla(problem: ConvolutionProblem) -> Lowering:
    """Where each channel is convolved alone, sums of shifted images."""
    gradient = problem.role == "kernel_gradient"
    way = Lowering("blocks", images=1) if gradient else Lowering("multiply_adds")
    fits = problem.is_depthwise and can_compute(problem, way, frozenset(("xla",)))
    return way if fits else DEFAULT


def _is_tiled_well(way: Lowering, problem: ConvolutionProblem) -> bool:
    return way.family != "winograd4" or min(problem.window.output_size) >= MIN_TILED


def _chunk(problem: ConvolutionProblem) -> int:
    """Images whose cotangent has about the size that the cache likes."""
    height, width = problem.window.output_size
    image_bytes = height * width * problem.features * problem.itemsize
    return max(1, CHUNK_BYTES // image_bytes)
