"""Geometry of a kernel that slides over images, and layouts of images: orders of their axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Literal, TypeVar, cast

from jax import Array, lax

Pair = tuple[int, int]
Sizes = TypeVar("Sizes", bound=tuple[int, ...])
Layout = Literal["nhwc", "chwn"]


def compute_reach(kernel: Sizes, dilation: Sizes) -> Sizes:
    """Return the number of positions that a dilated kernel covers along each axis."""
    spans = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
    return cast(Sizes, tuple(spans))


@dataclass(frozen=True)
class Slide:
    """Settings of a sliding kernel, for images of any size."""

    strides: Pair = (1, 1)
    pads: tuple[Pair, Pair] = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1


@dataclass(frozen=True)
class Axis:
    """Sizes, stride, dilation and pads along the height or the width of the images. The gradients
    read the dilated cotangent, which has stride - 1 zeros between its values."""

    size: int
    kernel: int
    stride: int
    dilation: int
    pads: Pair

    @property
    def dilated_extent(self) -> int:
        """Distance from the first to the last position of the image under the kernel."""
        return (self.kernel - 1) * self.dilation

    @property
    def last_offset(self) -> int:
        """Distance between the first and the last place of the sliding kernel."""
        return (self.size + sum(self.pads) - 1 - self.dilated_extent) // self.stride * self.stride

    @property
    def output_size(self) -> int:
        """Number of results along the axis."""
        return self.last_offset // self.stride + 1

    def slice_tap(self, position: int) -> slice:
        """Return the slice of the padded axis under a kernel position."""
        first = position * self.dilation
        return slice(first, first + self.last_offset + 1, self.stride)

    @property
    def input_grad_pads(self) -> Pair:
        """Pads of the dilated cotangent for which the flipped kernel has `size` results."""
        before = self.dilated_extent - self.pads[0]
        return before, self.size - 1 + self.dilated_extent - before - self.last_offset

    @property
    def transpose(self) -> Axis:
        """The axis of the flipped kernel over the dilated cotangent, with `size` results."""
        return Axis(self.last_offset + 1, self.kernel, 1, self.dilation, self.input_grad_pads)

    @property
    def weight_grad_pads(self) -> Pair:
        """Pads of the images for which the dilated cotangent has `kernel` results."""
        before = self.pads[0]
        return before, self.dilated_extent + self.last_offset + 1 - self.size - before


@dataclass(frozen=True)
class ConvWindow:
    """Both axes of a sliding kernel, and the number of groups of channels."""

    rows: Axis
    columns: Axis
    groups: int

    @property
    def sizes(self) -> Pair:
        return self.rows.size, self.columns.size

    @property
    def kernel(self) -> Pair:
        return self.rows.kernel, self.columns.kernel

    @property
    def strides(self) -> Pair:
        return self.rows.stride, self.columns.stride

    @property
    def dilation(self) -> Pair:
        return self.rows.dilation, self.columns.dilation

    @property
    def pads(self) -> tuple[Pair, Pair]:
        return self.rows.pads, self.columns.pads

    @property
    def slide(self) -> Slide:
        """Settings of the convolution."""
        return Slide(self.strides, self.pads, self.dilation, self.groups)

    @property
    def output_size(self) -> Pair:
        """Height and width of the result."""
        return self.rows.output_size, self.columns.output_size

    @property
    def is_pointwise(self) -> bool:
        """Whether each result reads one pixel with all channels."""
        unpadded = self.rows.pads == self.columns.pads == (0, 0)
        return unpadded and self.rows.kernel == self.columns.kernel == self.groups == 1

    @property
    def transpose(self) -> ConvWindow:
        """The window of the flipped kernel over the dilated cotangent."""
        return ConvWindow(self.rows.transpose, self.columns.transpose, self.groups)

    @property
    def input_grad_pads(self) -> tuple[Pair, Pair]:
        return self.rows.input_grad_pads, self.columns.input_grad_pads

    @property
    def weight_grad_pads(self) -> tuple[Pair, Pair]:
        return self.rows.weight_grad_pads, self.columns.weight_grad_pads


def make_window(
    sizes: Pair,
    kernel: Pair,
    strides: Pair,
    padding: str | Sequence[Pair],
    dilation: Pair,
    groups: int,
) -> ConvWindow:
    """Return a window; `padding` is "SAME", "VALID" or (before, after) of height and width."""
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(sizes, compute_reach(kernel, dilation), strides, padding)
    pads = [(before, after) for before, after in padding]
    rows, columns = starmap(Axis, zip(sizes, kernel, strides, dilation, pads, strict=True))
    return ConvWindow(rows, columns, groups)


def swap_layout(images: Array) -> Array:
    """Transpose images from NHWC to CHWN, or back."""
    return images.transpose(3, 1, 2, 0)
