"""The order of axes that a network computes its images in, and their padding.

NHWC is the order of the input, and every layer computes in it. CHWN has the batch innermost:
vectors consist of samples instead of channels, which is faster for few channels. Height and width
are axes 1 and 2 in both. Parameters are the same, so checkpoints are interchangeable.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol, runtime_checkable

from jax import Array, lax

from pipeline.core.host.platforms import platform_of
from pipeline.models.layers import standard
from pipeline.models.layers.fields import Padding
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.lowerings.problem.conv_window import Pair
from pipeline.models.lowerings.problem.image_layout import Layout
from pipeline.models.lowerings.problem.lowering import Problem
from pipeline.models.lowerings.problem.problems import ConvolutionProblem

PATCHES_LIMIT_BYTES = 13 << 20
"""Size of the largest patches with which CHWN is chosen: they are written once and read twice a
step, and must stay in the last-level cache. Measured on 2 cores with 32 MiB of it, float32: time
of a step in NHWC over that in CHWN, by the largest patches of the network, in MB:

    LeNet-5, batch 32    2.5   2.5 times      32, 64: 3x3, batch 64             14.5  1.0
    LeNet-5, batch 128  10.0   2.9            32, 64, 128: 3x3, 32x32, 64       18.9  1.3
    8, 16: 7x7, 32x32   12.8   1.7            64, 128: 3x3, 32x32, batch 32     18.9  0.8
    16, 32: 3x3, 32x32   9.4   1.3            16, 16: 5x5, 64x64, batch 32      52.4  0.7

In bfloat16, of which the patches are float32 as well, on 2 cores of a Xeon without AMX:

    LeNet-5, batch 32    2.5   2.2 times      16, 32: 3x3, 32x32                 9.4  1.3
    LeNet-5, batch 128  10.0   2.5            32, 64: 3x3, batch 64             14.5  1.4
    8, 16: 7x7, 32x32   12.8   1.2
"""

_CHWN_DTYPES = frozenset(("float32", "bfloat16"))

_CHWN_LAYERS = (
    standard.Activation,
    standard.AvgPool,
    standard.BatchNorm,
    standard.Conv,
    standard.Dense,
    standard.Dropout,
    standard.Flatten,
    standard.GlobalAvgPool,
    standard.MaxPool,
)
"""Layers that can be computed in CHWN."""


@runtime_checkable
class LaidOutNetwork(Protocol):
    """A network that can be computed in both layouts, if all its layers can."""

    dtype: str
    layout: Layout

    def can_be_batch_last(self, image: tuple[int, ...]) -> bool:
        """Return whether images (height, width, channels) can be computed in CHWN."""

    def structure(self, image: tuple[int, ...]) -> str:
        """Return a text of everything that decides the speed in a layout, except type and batch."""


def batch_first(x: Array, layout: Layout) -> Array:
    """Transpose images of a layout to (batch, height, width, channels); only images change."""
    return x.transpose(3, 1, 2, 0) if channel_axis(x, layout) == 0 else x


def channel_axis(x: Array, layout: Layout) -> int:
    """Return the axis of the channels, or of the features if x isn't an image: 0 or -1."""
    return 0 if x.ndim == 4 and layout == "chwn" else -1


def shape_nhwc(x: Array, layout: Layout) -> tuple[int, ...]:
    """Return the shape of x; of images as (batch, height, width, channels) in any layout."""
    channels, *sizes, batch = x.shape
    return (batch, *sizes, channels) if channel_axis(x, layout) == 0 else x.shape


def first_without_batch_last(stack: tuple[LayerSpec, ...]) -> LayerSpec | None:
    """Return the first layer that can't be computed in CHWN, if there is one."""
    for layer in stack:
        if not isinstance(layer, _CHWN_LAYERS) or getattr(layer, "groups", 1) != 1:
            return layer
    return None


def best_layout(problems: Sequence[Problem], platform: str) -> Layout:
    """Return the faster layout by a rule, for a network that both layouts can compute.

    `problems` are the problems of a training step in NHWC. The rule is CHWN on the CPU, for float32
    and bfloat16, if there is a convolution, and the patches of each are small.
    """
    convolutions = [problem for problem in problems if isinstance(problem, ConvolutionProblem)]
    if not has_choice(convolutions, platform):
        return "nhwc"
    small = all(_patches_bytes(problem) <= PATCHES_LIMIT_BYTES for problem in convolutions)
    return "chwn" if small and {p.dtype for p in convolutions} <= _CHWN_DTYPES else "nhwc"


def has_choice(problems: Sequence[Problem], platform: str) -> bool:
    """Return whether either layout may be faster: on the CPU, with convolutions."""
    slides = any(isinstance(problem, ConvolutionProblem) for problem in problems)
    return slides and platform_of(platform).chooses_lowerings


def _patches_bytes(problem: ConvolutionProblem) -> int:
    """Return the bytes of the matrix of patches of a convolution in CHWN, in float32."""
    window = problem.window
    return 4 * prod(window.kernel) * problem.channels * prod(window.output_size) * problem.batch


def reach(kernel: Pair, dilation: Pair) -> Pair:
    """Return the height and width from a kernel's first to its last row and column."""
    return (kernel[0] - 1) * dilation[0] + 1, (kernel[1] - 1) * dilation[1] + 1


def pads_around(sizes: Pair, window: Pair, strides: Pair, padding: Padding) -> tuple[Pair, Pair]:
    """Return the pads (before, after) of the height and the width of images of these sizes.

    `window` is the size that the kernel covers, dilation included.
    """
    if padding == "symmetric":
        rows, columns = (((covered - 1) // 2,) * 2 for covered in window)
    elif isinstance(padding, str):
        rows, columns = lax.padtype_to_pads(sizes, window, strides, padding.upper())
    elif isinstance(padding, int):
        rows = columns = (padding, padding)
    else:
        rows, columns = padding
    return rows, columns
