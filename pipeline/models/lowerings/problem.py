"""Computations of layers, described by the shapes that their speed depends on; the formulas and
lowerings that compute them, and the policies that choose these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from math import prod
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast, get_args

from jax import Array, lax

from pipeline.core.host.array_values import get_item_bytes

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
    def sample_bytes(self) -> int:
        """Bytes of one image."""
        return prod(self.window.sizes) * self.channels * get_compute_bytes(self.dtype)

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


Role = Literal["forward", "input_grad", "weight_grad"]
"""The result, the gradient by the input, the gradient by the weights."""
ROLES: tuple[Role, ...] = get_args(Role)
Engine = Literal["xla", "onednn"]
"""Library of matrix products and convolutions: the one that XLA chooses, or oneDNN."""

FILE_NAMES: Mapping[str, str] = {
    "input_grad": "images_gradient",
    "weight_grad": "kernel_gradient",
    "im2col": "patches",
    "pointwise": "pixels",
    "shifted_sum": "multiply_adds",
    "per_tap_matmul": "positions",
    "grouped_as_dense": "blocks",
    "transposed": "turned",
}
"""Names of roles and formulas in knowledge banks and run directories, if they differ."""
CODE_NAMES = {name: code for code, name in FILE_NAMES.items()}


def to_file_name(name: str) -> str:
    """Return the name of a role or a formula in files."""
    return FILE_NAMES.get(name, name)


@dataclass(frozen=True)
class Lowering:
    """A formula's name, the engine that multiplies, and the images of a chunk (None: all). The
    family `default` isn't a formula. It is a layer's computation for any platform."""

    family: str
    engine: Engine = "xla"
    images: int | None = None

    def __str__(self) -> str:
        """Return `family/engine` or `family/engine/images`, with the names in files."""
        chunk = f"/{self.images}" if self.images else ""
        return f"{to_file_name(self.family)}/{self.engine}{chunk}"

    @staticmethod
    def parse(text: str) -> Lowering:
        """Invert `str`. Raises ValueError for other texts."""
        family, engine, *chunk = text.split("/")
        engines: tuple[Engine, ...] = get_args(Engine)
        if engine not in engines or len(chunk) > 1:
            raise ValueError(f"{text!r} isn't a lowering, such as positions/onednn/8")
        images = int(chunk[0]) if chunk else None
        if images is not None and images < 1:
            raise ValueError(f"{text!r}: must compute at least one image at a time")
        return Lowering(CODE_NAMES.get(family, family), engines[engines.index(engine)], images)


DEFAULT = Lowering("default")

WIDENED: Mapping[str, str] = {"float16": "float32"}
"""Types that no library multiplies on a CPU, and the types in which they are computed. Sums are in
float32 for all types, and only the result is rounded."""


@dataclass(frozen=True)
class Formula:
    """A computation `compute(problem, lowering, *operands)` of the problems for which `fits` is
    true. `chunked` is whether it can compute chunks of images."""

    compute: Callable[..., Array]
    fits: Callable[[Any], bool] = lambda problem: True
    engines: tuple[Engine, ...] = ("xla", "onednn")
    chunked: bool = False


class LoweringPolicy(Protocol):
    """Chooses how the layers of a network are computed. It must be hashable, since it is a field of
    flax modules."""

    def choose(self, problem: Problem) -> Lowering:
        """Return the lowering for a problem."""


@dataclass(frozen=True)
class Lowerings:
    """A policy from a table; problems without an entry have the default."""

    chosen: tuple[tuple[str, Lowering], ...] = ()
    """Problems, as text, and their lowerings."""

    @cached_property
    def _table(self) -> dict[str, Lowering]:
        return dict(self.chosen)

    def choose(self, problem: Problem) -> Lowering:
        return self._table.get(str(problem), DEFAULT)


DEFAULTS = Lowerings()
"""Policy that always chooses the default."""


@dataclass(eq=False)
class RecordingPolicy:
    """Records the problems of a network while it is traced, in their order."""

    problems: dict[Problem, None] = field(default_factory=dict)

    def choose(self, problem: Problem) -> Lowering:
        self.problems[problem] = None
        return DEFAULT
