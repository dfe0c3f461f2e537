"""What to take for shapes that no bank knows."""

from __future__ import annotations

from pipeline.models.lowerings.candidates import candidates
from pipeline.models.lowerings.lowering import DEFAULT, Engine, Lowering, Problem

LARGE_FLOPS = 50_000_000
"""From here on a convolution is worth a library call of its own."""

MIN_CHANNELS = 16
"""Below, oneDNN fills its vectors with zeros."""

CHUNK_BYTES = 1 << 20
"""About what of the cotangent should be looked at at once: half of a core's L2 cache."""


def is_worth_a_call(problem: Problem) -> bool:
    """Whether a problem is large, and has channels enough, for oneDNN."""
    wide = min(problem.channels, problem.features) >= MIN_CHANNELS
    return wide and problem.flops >= LARGE_FLOPS


def usual_lowering(problem: Problem, engines: frozenset[Engine]) -> Lowering:
    """oneDNN's convolution for what is large and has channels enough, else the default.

    What the tuner found on AVX-512 for the shapes of residual networks, as a rule.
    """
    if "onednn" not in engines or not is_worth_a_call(problem):
        return DEFAULT
    ways = candidates(problem, engines)
    wanted = {
        "forward": ["convolution"],
        "images_gradient": ["phases", "convolution"],
        "kernel_gradient": ["convolution"],
    }[problem.role]
    for family in wanted:
        fitting = [way for way in ways if (way.family, way.engine) == (family, "onednn")]
        if fitting:
            return min(
                fitting, key=lambda way: abs((way.images or problem.batch) - _chunk(problem))
            )
    return DEFAULT


def _chunk(problem: Problem) -> int:
    """Images whose cotangent has about the size that the cache likes."""
    height, width = problem.window.positions
    image_bytes = height * width * problem.features * (2 if problem.dtype == "bfloat16" else 4)
    return max(1, CHUNK_BYTES // image_bytes)
