"""Convolutions, dense layers and matrix products; most are computed by the package's lowerings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.lowerings.conv2d_chwn import conv2d_chwn
from pipeline.models.lowerings.conv2d_transpose import transpose_window
from pipeline.models.lowerings.formulas.conv2d_input_grad import rotate_and_swap
from pipeline.models.lowerings.lowered_layers import conv2d as lowered_conv2d
from pipeline.models.lowerings.lowered_layers import multiply_dense
from pipeline.models.lowerings.problem import Axis, ConvWindow, Pair
from pipeline.models.modules.convolution import add_bias
from pipeline.models.torch_graph.graph import HWIO, IO
from pipeline.models.torch_graph.operator_table import (
    IMAGE_ORDERS,
    NHWC,
    OPERATORS,
    OperatorContext,
    TorchTensor,
    aten,
    plain,
    to_tensor,
)


def as_pair(sizes: int | Sequence[int]) -> Pair:
    """Return one or two numbers as height and width."""
    height, width = list_sizes(sizes, 2)
    return height, width


def list_sizes(sizes: int | Sequence[int], num_axes: int) -> tuple[int, ...]:
    """Return one number, or one for each axis, as a number for each axis."""
    numbers = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return numbers * num_axes if len(numbers) == 1 else numbers


@dataclass(frozen=True)
class Convolution:
    """Settings of a convolution, in ATen's order."""

    stride: int | Sequence[int] = 1
    padding: int | Sequence[int] | str = 0
    dilation: int | Sequence[int] = 1
    groups: int = 1


@dataclass(frozen=True)
class TransposedConvolution:
    """Settings of the transpose of a convolution, in ATen's order."""

    stride: int | Sequence[int] = 1
    padding: int | Sequence[int] = 0
    output_padding: int | Sequence[int] = 0
    groups: int = 1
    dilation: int | Sequence[int] = 1


@aten("conv2d.default", "conv2d.padding", kind="conv", full_weights=True, settings=Convolution)
def conv2d(
    context: OperatorContext,
    x: TorchTensor,
    weight: TorchTensor,
    bias: TorchTensor | None = None,
    settings: Convolution = Convolution(),
) -> TorchTensor:
    """Convolve images, in NHWC by the lowering that the policy chooses, in CHWN by one formula."""
    if x.ndim != 4 or weight.ndim != 4:
        raise ValueError(f"a convolution of shape {x.shape} with a kernel of {weight.shape}")
    groups = settings.groups
    if x.shape[1] != weight.shape[1] * groups:
        raise ValueError(f"{x.shape[1]} channels; must be the kernel's {weight.shape[1] * groups}")
    kernel = weight.transpose(HWIO).astype(x.dtype)
    dilation = as_pair(settings.dilation)
    # A graph is computed in CHWN only if its convolutions have one group.
    convolve: Callable[..., Array] = conv2d_chwn
    if context.layout == "nhwc":
        convolve = partial(lowered_conv2d, groups=groups, policy=context.policy)
    order = IMAGE_ORDERS[context.layout]
    y = convolve(
        x.transpose(order),
        kernel,
        strides=as_pair(settings.stride),
        padding=make_pads(settings.padding, kernel.shape[:2], dilation),
        dilation=dilation,
    )
    return _add_bias(TorchTensor(y, order), bias)


def _add_bias(y: TorchTensor, bias: TorchTensor | None, axis: int = 1) -> TorchTensor:
    """Add a float32 bias along PyTorch's axis, by default channels. Only the sum is rounded."""
    if bias is None:
        return y
    return y.with_array(add_bias(y.array, bias.array, y.order.index(axis), rounds_bias=False))


def make_pads(
    padding: int | Sequence[int] | str, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[Pair, ...]:
    """Return the pads (before, after) of each axis of a kernel.

    If the total of "same" is odd, the pad after is larger by one.
    """
    if padding == "same":
        totals = [(size - 1) * step for size, step in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    sizes = list_sizes(0 if isinstance(padding, str) else padding, len(kernel))
    return tuple((size, size) for size in sizes)


@aten("conv1d.default", "conv1d.padding", kind="conv", full_weights=True, settings=Convolution)
def conv1d(
    context: OperatorContext,
    x: TorchTensor,
    weight: TorchTensor,
    bias: TorchTensor | None = None,
    settings: Convolution = Convolution(),
) -> TorchTensor:
    """Convolve sequences (batch, channels, length) as images of height 1."""
    image = to_tensor(x.plain()[:, :, None, :])
    kernel = to_tensor(weight.plain()[:, :, None, :])
    padding = settings.padding
    image_settings = Convolution(
        (1, as_pair(settings.stride)[0]),
        padding if isinstance(padding, str) else (0, as_pair(padding)[0]),
        (1, as_pair(settings.dilation)[0]),
        settings.groups,
    )
    y = conv2d(context, image, kernel, bias, image_settings)
    # (batch, 1, length, channels): a graph with this operator is never computed in CHWN.
    return TorchTensor(y.array[:, 0], (0, 2, 1))


@aten("conv3d.default", "conv3d.padding", kind="conv", full_weights=True, settings=Convolution)
def conv3d(
    x: TorchTensor,
    weight: TorchTensor,
    bias: TorchTensor | None = None,
    settings: Convolution = Convolution(),
) -> TorchTensor:
    """Convolve volumes (batch, channels, depth, height, width), by XLA's operation."""
    if x.ndim != 5 or weight.ndim != 5:
        raise ValueError(f"a convolution of shape {x.shape} with a kernel of {weight.shape}")
    kernel = weight.plain().astype(x.dtype)
    dilation = list_sizes(settings.dilation, 3)
    y = lax.conv_general_dilated(
        x.plain(),
        kernel,
        list_sizes(settings.stride, 3),
        make_pads(settings.padding, kernel.shape[2:], dilation),
        rhs_dilation=dilation,
        feature_group_count=settings.groups,
    )
    return _add_bias(to_tensor(y), bias)


@aten("im2col.default")
def im2col(
    x: TorchTensor,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> TorchTensor:
    """Return windows of images as columns (batch, channels * pixels of a window, windows)."""
    pads = [(size, size) for size in as_pair(padding)]
    window = as_pair(kernel_size)
    columns = lax.conv_general_dilated_patches(
        x.plain(), window, as_pair(stride), pads, rhs_dilation=as_pair(dilation)
    )
    return to_tensor(columns.reshape((*columns.shape[:2], -1)))


@aten("col2im.default")
def col2im(x: TorchTensor, output_size: Sequence[int], *window: Sequence[int]) -> TorchTensor:
    """Return images that are sums of columns, the transpose of `im2col`."""
    columns = x.plain()
    kernel = as_pair(window[0])
    shape = (columns.shape[0], columns.shape[1] // (kernel[0] * kernel[1]), *output_size)
    example = jax.ShapeDtypeStruct(shape, columns.dtype)
    transpose = jax.linear_transpose(
        lambda images: im2col(to_tensor(images), *window).array, example
    )
    (images,) = transpose(columns)
    return to_tensor(images)


@aten(
    "conv_transpose2d.input",
    kind="conv_transpose",
    full_weights=True,
    settings=TransposedConvolution,
)
def conv_transpose2d(
    context: OperatorContext,
    x: TorchTensor,
    weight: TorchTensor,
    bias: TorchTensor | None = None,
    settings: TransposedConvolution = TransposedConvolution(),
) -> TorchTensor:
    """Apply the transpose of a convolution, with a kernel (in, out / groups, height, width).

    It is computed in NHWC by the lowering that the policy chooses.
    """
    images = x.transpose(NHWC)
    rows, columns = map(
        _make_transposed_axis,
        images.shape[1:3],
        weight.shape[2:],
        as_pair(settings.stride),
        as_pair(settings.dilation),
        as_pair(settings.padding),
        as_pair(settings.output_padding),
    )
    # The kernel of each group is rotated, and its inputs and outputs are swapped.
    kernel = rotate_and_swap(weight.transpose(HWIO).astype(x.dtype), settings.groups)
    y = transpose_window(ConvWindow(rows, columns, settings.groups), images, kernel, context.policy)
    return _add_bias(TorchTensor(y, NHWC), bias)


@aten(
    "conv_transpose1d.default",
    kind="conv_transpose",
    full_weights=True,
    settings=TransposedConvolution,
)
def conv_transpose1d(
    context: OperatorContext,
    x: TorchTensor,
    weight: TorchTensor,
    bias: TorchTensor | None = None,
    settings: TransposedConvolution = TransposedConvolution(),
) -> TorchTensor:
    """Apply the transpose of a convolution of sequences, as images of height 1."""
    image_settings = TransposedConvolution(
        (1, as_pair(settings.stride)[0]),
        (0, as_pair(settings.padding)[0]),
        (0, as_pair(settings.output_padding)[0]),
        settings.groups,
        (1, as_pair(settings.dilation)[0]),
    )
    image = to_tensor(x.plain()[:, :, None, :])
    kernel = to_tensor(weight.plain()[:, :, None, :])
    y = conv_transpose2d(context, image, kernel, bias, image_settings)
    return TorchTensor(y.array[:, 0], (0, 2, 1))


@aten(
    "conv_transpose3d.input",
    kind="conv_transpose",
    full_weights=True,
    settings=TransposedConvolution,
)
def conv_transpose3d(
    x: TorchTensor,
    weight: TorchTensor,
    bias: TorchTensor | None = None,
    settings: TransposedConvolution = TransposedConvolution(),
) -> TorchTensor:
    """Apply the transpose of a convolution of volumes, by XLA's operation."""
    groups = settings.groups
    kernel = weight.plain().astype(x.dtype)
    inputs, outputs, *window = kernel.shape
    # The kernel of each group is rotated, and its inputs and outputs are swapped.
    kernel = jnp.flip(kernel, (2, 3, 4)).reshape(groups, inputs // groups, outputs, *window)
    kernel = jnp.swapaxes(kernel, 1, 2).reshape(groups * outputs, inputs // groups, *window)
    dilation = list_sizes(settings.dilation, 3)
    reaches = [(size - 1) * step for size, step in zip(window, dilation, strict=True)]
    padding = list_sizes(settings.padding, 3)
    extra = list_sizes(settings.output_padding, 3)
    pads = [
        (reach - pad, reach - pad + more)
        for reach, pad, more in zip(reaches, padding, extra, strict=True)
    ]
    y = lax.conv_general_dilated(
        x.plain(),
        kernel,
        (1, 1, 1),
        pads,
        lhs_dilation=list_sizes(settings.stride, 3),
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    return _add_bias(to_tensor(y), bias)


@dataclass(frozen=True)
class AnyConvolution:
    """Settings of a convolution of any number of axes, or of its transpose, in ATen's order."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


@aten("convolution.default", kind="conv", full_weights=True, settings=AnyConvolution)
def convolution(
    context: OperatorContext,
    x: TorchTensor,
    weight: TorchTensor,
    bias: TorchTensor | None,
    settings: AnyConvolution,
) -> TorchTensor:
    """Convolve sequences, images or volumes, or apply the transpose of their convolution."""
    s = settings
    number = weight.ndim - 3
    if number not in range(3):
        raise ValueError(f"a convolution with a kernel of {weight.shape}")
    name = f"{number + 1}d.{'input' if number else 'default'}"
    if s.transposed:
        options = (s.stride, s.padding, s.output_padding, s.groups, s.dilation)
        return OPERATORS[f"aten.conv_transpose{name}"](context, x, weight, bias, *options)  # type: ignore[no-any-return]
    convolve = OPERATORS[f"aten.conv{number + 1}d.default"]
    return convolve(context, x, weight, bias, s.stride, s.padding, s.dilation, s.groups)  # type: ignore[no-any-return]


def _make_transposed_axis(
    size: int, kernel: int, stride: int, dilation: int, padding: int, output_padding: int
) -> Axis:
    """Return the axis of the convolution whose transpose turns `size` rows into the result."""
    result = (size - 1) * stride - 2 * padding + (kernel - 1) * dilation + 1 + output_padding
    # If the output padding is at least a stride, the pad after is smaller. Otherwise the
    # convolution would have more than `size` positions.
    pad_after = padding - output_padding // stride * stride
    return Axis(result, kernel, stride, dilation, (padding, pad_after))


@aten("linear.default", kind="dense", full_weights=True)
def linear(
    context: OperatorContext, x: TorchTensor, weight: TorchTensor, bias: TorchTensor | None = None
) -> TorchTensor:
    """Multiply the last axis with a kernel (out, in), by the lowering that the policy chooses."""
    if weight.ndim != 2 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"a product of shape {x.shape} with a kernel of {weight.shape}")
    order = x.order if x.order[-1] == x.ndim - 1 else tuple(range(x.ndim))
    kernel = weight.transpose(IO).astype(x.dtype)
    y = multiply_dense(x.transpose(order), kernel, context.policy)
    return _add_bias(TorchTensor(y, order), bias, x.ndim - 1)


@aten("addmm.default", kind="dense")
def addmm(
    context: OperatorContext,
    x: TorchTensor,
    first: TorchTensor,
    second: TorchTensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> TorchTensor:
    """Return beta * x + alpha * first @ second for matrices."""
    y = multiply_dense(first.plain(), second.plain().astype(first.dtype), context.policy)
    return to_tensor(beta * x.plain() + alpha * y)


aten("matmul.default", "bmm.default", "mm.default", "mv.default", "dot.default")(plain(jnp.matmul))
aten("baddbmm.default")(
    plain(lambda x, first, second, *, beta=1, alpha=1: beta * x + alpha * jnp.matmul(first, second))
)


@aten("einsum.default")
def einsum(equation: str, operands: Sequence[TorchTensor], path: object = None) -> TorchTensor:
    """Return a sum of products by Einstein's convention."""
    return to_tensor(jnp.einsum(equation.replace(" ", ""), *(x.plain() for x in operands)))
