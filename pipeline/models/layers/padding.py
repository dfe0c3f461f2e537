"""Zero padding around images."""

from __future__ import annotations

from jax import lax

from pipeline.models.layers.fields import Padding
from pipeline.models.lowerings.problem.conv_window import Pair


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
