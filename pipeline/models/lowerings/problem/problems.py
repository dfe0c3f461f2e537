"""Computations of layers, described by the shapes that their speed depends on."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

from jax import Array

from pipeline.core.host.item_sizes import get_item_bytes
from pipeline.models.lowerings.problem.conv_window import ConvWindow, Pair, make_window
from pipeline.models.lowerings.problem.lowering import WIDENED, Role, to_file_name

Kind = Literal["conv2d", "dense", "max_pool"]
Shape = tuple[int, ...]


def get_compute_bytes(dtype: str) -> int:
    """Return the bytes of a value in the computation: 4 for the types of `WIDENED`."""
    return get_item_bytes(WIDENED.get(dtype, dtype))


def _list_operand_shapes(
    role: Role, inputs: Shape, kernel: Shape, cotangent: Shape
) -> tuple[Shape, ...]:
    if role == "forward":
        return inputs, kernel
    return (kernel if role == "input_grad" else inputs), cotangent


def _format_pads(pads: tuple[Pair, Pair]) -> str:
    return ",".join(f"{before}+{after}" for before, after in pads)


@dataclass(frozen=True)
class ConvolutionProblem:
    """One of the three computations of a convolution."""

    kind: ClassVar[Kind] = "conv2d"
    role: Role
    """The requested array: the result, or a gradient."""
    window: ConvWindow
    batch: int
    channels: int
    features: int
    dtype: str
    """Type of the operands and of the result."""

    @property
    def operand_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the arrays that the role reads, in the order of its formulas."""
        window = self.window
        images = (self.batch, *window.sizes, self.channels)
        kernel = (*window.kernel, self.channels // window.groups, self.features)
        cotangent = (self.batch, *window.output_size, self.features)
        return _list_operand_shapes(self.role, images, kernel, cotangent)

    @property
    def flops(self) -> int:
        """Multiplications and additions; the same in all three roles."""
        window = self.window
        num_results = self.batch * prod(window.output_size) * self.features
        return 2 * num_results * prod(window.kernel) * self.channels // window.groups

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return 1 < self.window.groups == self.channels == self.features

    @property
    def itemsize(self) -> int:
        """Bytes of a value in the computation."""
        return get_compute_bytes(self.dtype)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one image."""
        return prod(self.window.sizes) * self.channels * self.itemsize

    def __str__(self) -> str:
        w = self.window
        return (
            f"{self.kind} {to_file_name(self.role)} "
            f"{self.batch}x{w.sizes[0]}x{w.sizes[1]}x{self.channels} "
            f"kernel {w.kernel[0]}x{w.kernel[1]}x{self.features} "
            f"stride {w.strides[0]}x{w.strides[1]} pads {_format_pads(w.pads)} "
            f"dilation {w.dilation[0]}x{w.dilation[1]} groups {w.groups} {self.dtype}"
        )


def make_convolution_problem(
    role: Role, window: ConvWindow, images: Array, kernel: Array
) -> ConvolutionProblem:
    """Return the problem of a role of a convolution with these operands."""
    batch, _, _, channels = images.shape
    return ConvolutionProblem(role, window, batch, channels, kernel.shape[3], str(images.dtype))


@dataclass(frozen=True)
class DenseProblem:
    """One of the three products of a dense layer; `batch` is the number of rows or tokens."""

    kind: ClassVar[Kind] = "dense"
    role: Role
    batch: int
    channels: int
    features: int
    dtype: str

    @property
    def operand_shapes(self) -> tuple[Shape, ...]:
        kernel = (self.channels, self.features)
        cotangent = (self.batch, self.features)
        return _list_operand_shapes(self.role, (self.batch, self.channels), kernel, cotangent)

    @property
    def flops(self) -> int:
        """Multiplications and additions; the same in all three roles."""
        return 2 * self.batch * self.channels * self.features

    @property
    def sample_bytes(self) -> int:
        """Bytes of one row."""
        return self.channels * get_compute_bytes(self.dtype)

    def __str__(self) -> str:
        shape = f"{self.batch}x{self.channels} kernel {self.channels}x{self.features}"
        return f"{self.kind} {to_file_name(self.role)} {shape} {self.dtype}"


@dataclass(frozen=True)
class PoolingProblem:
    """The maxima of moving windows over axes 1 and 2 of an array, or their gradient."""

    kind: ClassVar[Kind] = "max_pool"
    role: Role
    shape: Shape
    window: Pair
    strides: Pair
    pads: tuple[Pair, Pair]
    dtype: str

    @property
    def batch(self) -> int:
        """Number of samples, or of channels if the first axis has channels."""
        return self.shape[0]

    @property
    def operand_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the images, and for the gradient also of the cotangent."""
        if self.role == "forward":
            return (self.shape,)
        batch, height, width, channels = self.shape
        window = make_window((height, width), self.window, self.strides, self.pads, (1, 1), 1)
        return self.shape, (batch, *window.output_size, channels)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one image."""
        return prod(self.shape[1:]) * get_compute_bytes(self.dtype)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return (
            f"{self.kind} {to_file_name(self.role)} {shape} "
            f"window {self.window[0]}x{self.window[1]} stride {self.strides[0]}x{self.strides[1]} "
            f"pads {_format_pads(self.pads)} {self.dtype}"
        )


Problem = ConvolutionProblem | DenseProblem | PoolingProblem
"""A layer's computation, which has several lowerings; its text identifies it in knowledge banks."""
