"""Two-dimensional convolution whose gradients stay fast on XLA:CPU inside a loop.

XLA:CPU computes a convolution with its fast library where operands and result are laid out as
NHWC, HWIO and NHWC. The gradients that jax derives permute those dimensions. Outside a loop the
compiler permutes them back; in the body of a `fori_loop` or a `scan` it emits a scalar loop that is
10 to 100 times slower (jax issue 12868). Here both gradients are convolutions in that order, with
explicit transposes. Other platforms get the gradients that jax derives: their compilers look for
those.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata

Pair = tuple[int, int]

_convolve = functools.partial(lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def conv2d(
    images: Array,
    kernel: Array,
    *,
    strides: Pair = (1, 1),
    padding: str | Sequence[Pair] = "SAME",
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Array:
    """Convolve images (batch, height, width, channels) with a kernel of the same dtype.

    The kernel is HWIO: (height, width, channels // groups, features). The result has shape
    (batch, height, width, features). `padding` is "SAME", "VALID" or the zeros put (before, after)
    the height and the width; `dilation` spreads the kernel. Differentiable in reverse mode only.
    """
    sizes, kernel_sizes = images.shape[1:3], kernel.shape[:2]
    if isinstance(padding, str):
        windows = [(k - 1) * d + 1 for k, d in zip(kernel_sizes, dilation, strict=True)]
        padding = lax.padtype_to_pads(sizes, windows, strides, padding)
    rows, columns = (
        _Axis(size, k, stride, spread, (before, after))
        for size, k, stride, spread, (before, after) in zip(
            sizes, kernel_sizes, strides, dilation, padding, strict=True
        )
    )
    return _conv2d(_Window(rows, columns, groups), images, kernel)


@dataclass(frozen=True)
class _Axis:
    """How the kernel moves along the height or the width of the images."""

    size: int
    kernel: int
    stride: int
    dilation: int
    pads: Pair

    @property
    def span(self) -> int:
        """From the first to the last row under the kernel."""
        return (self.kernel - 1) * self.dilation

    @property
    def reach(self) -> int:
        """From the first to the last position of the kernel."""
        return (self.size + sum(self.pads) - 1 - self.span) // self.stride * self.stride

    def images_gradient_pads(self) -> Pair:
        """Pads of the spread cotangent under which the flipped kernel gives `size` rows back."""
        before = self.span - self.pads[0]
        return before, self.size - 1 + self.span - before - self.reach

    def kernel_gradient_pads(self) -> Pair:
        """Pads of the images under which the spread cotangent gives `kernel` rows back."""
        before = self.pads[0]
        return before, self.span + self.reach + 1 - self.size - before


@dataclass(frozen=True)
class _Window:
    """How the kernel moves over the images, and between how many groups both are divided."""

    rows: _Axis
    columns: _Axis
    groups: int

    @property
    def strides(self) -> Pair:
        return self.rows.stride, self.columns.stride

    @property
    def dilation(self) -> Pair:
        return self.rows.dilation, self.columns.dilation

    @property
    def is_pointwise(self) -> bool:
        """Whether each result comes from one pixel and all of its channels."""
        unpadded = self.rows.pads == self.columns.pads == (0, 0)
        return unpadded and self.rows.kernel == self.columns.kernel == self.groups == 1


def _slide(window: _Window, images: Array, kernel: Array) -> Array:
    return _convolve(
        images,
        kernel,
        window.strides,
        (window.rows.pads, window.columns.pads),
        rhs_dilation=window.dilation,
        feature_group_count=window.groups,
    )


_conv2d = jax.custom_vjp(_slide, nondiff_argnums=(0,))


def _forward(window: _Window, images: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _slide(window, images, kernel), (images, kernel)


def _backward(
    window: _Window, operands: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    return lax.platform_dependent(
        *operands,
        cotangent,
        cpu=functools.partial(_gradients, window),
        default=functools.partial(_derived_gradients, window),
    )


_conv2d.defvjp(_forward, _backward)


def _gradients(
    window: _Window, images: Array, kernel: Array, cotangent: Array
) -> tuple[Array, Array]:
    by_kernel = _pointwise_kernel_gradient if window.is_pointwise else _kernel_gradient
    # In a call of its own, because else XLA fuses all that made the images, up to a whole stage of
    # residual blocks, into their transpose, and computes it again one strided element at a time.
    with set_xla_metadata(inlineable="false"):
        kernel_gradient = jax.jit(by_kernel, static_argnums=0)(window, images, cotangent)
    return _images_gradient(window, kernel, cotangent), kernel_gradient


def _derived_gradients(
    window: _Window, images: Array, kernel: Array, cotangent: Array
) -> tuple[Array, Array]:
    by_images = jax.linear_transpose(lambda images: _slide(window, images, kernel), images)
    by_kernel = jax.linear_transpose(lambda kernel: _slide(window, images, kernel), kernel)
    return *by_images(cotangent), *by_kernel(cotangent)


def _images_gradient(window: _Window, kernel: Array, cotangent: Array) -> Array:
    """Slide the flipped kernel over the cotangent, spread by the strides."""
    height, width, channels, features = kernel.shape
    groups = window.groups
    flipped = jnp.flip(kernel, (0, 1)).reshape(height, width, channels, groups, features // groups)
    flipped = flipped.transpose(0, 1, 4, 3, 2)
    return _convolve(
        cotangent,
        flipped.reshape(height, width, features // groups, groups * channels),
        (1, 1),
        (window.rows.images_gradient_pads(), window.columns.images_gradient_pads()),
        lhs_dilation=window.strides,
        rhs_dilation=window.dilation,
        feature_group_count=groups,
    )


def _kernel_gradient(window: _Window, images: Array, cotangent: Array) -> Array:
    """Slide the cotangent, spread by the strides, over the images; the batch is what is summed."""
    batch, height, width, channels = images.shape
    groups = window.groups
    by_channel = images.reshape(batch, height, width, groups, channels // groups)
    by_channel = by_channel.transpose(4, 1, 2, 3, 0)
    gradient = _convolve(
        by_channel.reshape(channels // groups, height, width, groups * batch),
        cotangent.transpose(1, 2, 0, 3),
        window.dilation,
        (window.rows.kernel_gradient_pads(), window.columns.kernel_gradient_pads()),
        rhs_dilation=window.strides,
        feature_group_count=groups,
    )
    return gradient.transpose(1, 2, 0, 3)


def _pointwise_kernel_gradient(window: _Window, images: Array, cotangent: Array) -> Array:
    """One matrix product, some 3 times as fast as the convolution that it equals."""
    down, across = window.strides
    seen = images[:, ::down, ::across]
    return jnp.einsum("bhwi,bhwo->io", seen, cotangent)[None, None]
