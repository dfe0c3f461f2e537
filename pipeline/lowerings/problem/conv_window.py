"""How a kernel moves over images: the geometry that every lowering starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax import lax

Pair = tuple[int, int]


@dataclass(frozen=True)
class Axis:
    """How the kernel moves along the height or the width of the images."""

    size: int
    kernel: int
    stride: int
    dilation: int
    pads: Pair

    @property
    def dilated_extent(self) -> int:
        """From the first to the last row under the kernel."""
        return (self.kernel - 1) * self.dilation

    @property
    def last_offset(self) -> int:
        """From the first to the last position of the kernel."""
        return (self.size + sum(self.pads) - 1 - self.dilated_extent) // self.stride * self.stride

    @property
    def output_size(self) -> int:
        """How many results there are along the axis."""
        return self.last_offset // self.stride + 1

    def images_gradient_pads(self) -> Pair:
        """Pads of the spread cotangent under which the flipped kernel gives `size` rows back."""
        before = self.dilated_extent - self.pads[0]
        return before, self.size - 1 + self.dilated_extent - before - self.last_offset

    def turned(self) -> Axis:
        """Of the flipped kernel over the spread cotangent, which gives `size` rows back."""
        return Axis(
            self.last_offset + 1, self.kernel, 1, self.dilation, self.images_gradient_pads()
        )

    def kernel_gradient_pads(self) -> Pair:
        """Pads of the images under which the spread cotangent gives `kernel` rows back."""
        before = self.pads[0]
        return before, self.dilated_extent + self.last_offset + 1 - self.size - before


@dataclass(frozen=True)
class Window:
    """How the kernel moves over the images, and between how many groups both are divided."""

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
    def output_size(self) -> Pair:
        """Height and width of the result."""
        return self.rows.output_size, self.columns.output_size

    @property
    def is_pointwise(self) -> bool:
        """Whether each result comes from one pixel and all of its channels."""
        unpadded = self.rows.pads == self.columns.pads == (0, 0)
        return unpadded and self.rows.kernel == self.columns.kernel == self.groups == 1

    @property
    def turned(self) -> Window:
        """How the flipped kernel moves over the spread cotangent."""
        return Window(self.rows.turned(), self.columns.turned(), self.groups)

    @property
    def images_gradient_pads(self) -> tuple[Pair, Pair]:
        return self.rows.images_gradient_pads(), self.columns.images_gradient_pads()

    @property
    def kernel_gradient_pads(self) -> tuple[Pair, Pair]:
        return self.rows.kernel_gradient_pads(), self.columns.kernel_gradient_pads()


def make_window(
    sizes: Pair,
    kernel: Pair,
    strides: Pair,
    padding: str | Sequence[Pair],
    dilation: Pair,
    groups: int,
) -> Window:
    """The window; `padding` is "SAME", "VALID" or (before, after) of the height and the width."""
    if isinstance(padding, str):
        windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
        padding = lax.padtype_to_pads(sizes, windows, strides, padding)
    rows, columns = (
        Axis(size, k, stride, spread, (before, after))
        for size, k, stride, spread, (before, after) in zip(
            sizes, kernel, strides, dilation, padding, strict=True
        )
    )
    return Window(rows, columns, groups)
