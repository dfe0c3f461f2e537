"""Computations of layers, described by the shapes that their speed depends on."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

from jax import Array

from pipeline.models.lowerings.problem.conv_window import ConvWindow, Pair
from pipeline.models.lowerings.problem.lowering import WIDENED, Role

Kind = Literal["conv2d", "dense", "max_pool"]


def itemsize(dtype: str) -> int:
    """Bytes of a value while it is computed: 4 for the types of `WIDENED`."""
    return 2 if WIDENED.get(dtype, dtype) == "bfloat16" else 4


@dataclass(frozen=True)
class ConvolutionProblem:
    """One of the three computations of a convolution."""

    kind: ClassVar[Kind] = "conv2d"
    role: Role
    window: ConvWindow
    batch: int
    channels: int
    features: int
    dtype: str

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the two arrays that the role reads, in the order of its formulas."""
        w = self.window
        images = (self.batch, *w.sizes, self.channels)
        kernel = (*w.kernel, self.channels // w.groups, self.features)
        cotangent = (self.batch, *w.output_size, self.features)
        pairs = {
            "forward": (images, kernel),
            "images_gradient": (kernel, cotangent),
            "kernel_gradient": (images, cotangent),
        }
        return pairs[self.role]

    @property
    def flops(self) -> int:
        """Multiplications and additions; the same in all three roles."""
        w = self.window
        pixels = self.batch * prod(w.output_size)
        return 2 * pixels * prod(w.kernel) * self.channels // w.groups * self.features

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is convolved alone."""
        return 1 < self.window.groups == self.channels == self.features

    @property
    def itemsize(self) -> int:
        """Bytes of a value as it is multiplied."""
        return itemsize(self.dtype)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one image."""
        return prod(self.window.sizes) * self.channels * self.itemsize

    def __str__(self) -> str:
        w = self.window
        pads = ",".join(f"{before}+{after}" for before, after in w.pads)
        return (
            f"{self.kind} {self.role} {self.batch}x{w.sizes[0]}x{w.sizes[1]}x{self.channels} "
            f"kernel {w.kernel[0]}x{w.kernel[1]}x{self.features} "
            f"stride {w.strides[0]}x{w.strides[1]} pads {pads} "
            f"dilation {w.dilation[0]}x{w.dilation[1]} groups {w.groups} {self.dtype}"
        )


def convolution_problem(
    role: Role, window: ConvWindow, images: Array, kernel: Array
) -> ConvolutionProblem:
    """The problem of one role of a convolution with these operands."""
    batch, channels, features = images.shape[0], images.shape[3], kernel.shape[3]
    return ConvolutionProblem(role, window, batch, channels, features, str(images.dtype))


@dataclass(frozen=True)
class DenseProblem:
    """One of the three products of a dense layer; `batch` is the number of rows, of all tokens."""

    kind: ClassVar[Kind] = "dense"
    role: Role
    batch: int
    channels: int
    features: int
    dtype: str

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the two matrices that the role reads, in the order of its formulas."""
        inputs, kernel = (self.batch, self.channels), (self.channels, self.features)
        cotangent = (self.batch, self.features)
        pairs = {
            "forward": (inputs, kernel),
            "images_gradient": (kernel, cotangent),
            "kernel_gradient": (inputs, cotangent),
        }
        return pairs[self.role]

    @property
    def flops(self) -> int:
        """Multiplications and additions; the same in all three roles."""
        return 2 * self.batch * self.channels * self.features

    @property
    def sample_bytes(self) -> int:
        """Bytes of one row."""
        return self.channels * itemsize(self.dtype)

    def __str__(self) -> str:
        shape = f"{self.batch}x{self.channels} kernel {self.channels}x{self.features}"
        return f"{self.kind} {self.role} {shape} {self.dtype}"


@dataclass(frozen=True)
class PoolingProblem:
    """The maxima of moving windows over axes 1 and 2 of an array, or their gradient."""

    kind: ClassVar[Kind] = "max_pool"
    role: Role
    shape: tuple[int, ...]
    window: Pair
    strides: Pair
    pads: tuple[Pair, Pair]
    dtype: str

    @property
    def batch(self) -> int:
        """Samples, or channels where those come first."""
        return self.shape[0]

    @property
    def pooled(self) -> tuple[int, ...]:
        """The shape of the maxima."""
        height, width = (
            (size + sum(pad) - window) // stride + 1
            for size, pad, window, stride in zip(
                self.shape[1:3], self.pads, self.window, self.strides, strict=True
            )
        )
        return (self.shape[0], height, width, self.shape[3])

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the images, and for the gradient also of the cotangent."""
        return (self.shape,) if self.role == "forward" else (self.shape, self.pooled)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one image."""
        return prod(self.shape[1:]) * itemsize(self.dtype)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        pads = ",".join(f"{before}+{after}" for before, after in self.pads)
        return (
            f"{self.kind} {self.role} {shape} window {self.window[0]}x{self.window[1]} "
            f"stride {self.strides[0]}x{self.strides[1]} pads {pads} {self.dtype}"
        )
