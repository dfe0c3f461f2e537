"""PyTorch's tensors as arrays of JAX, whose axes may be in another order.

PyTorch's images are NCHW, but convolutions are faster in NHWC. A `TorchTensor` stores which axis of
PyTorch's tensor each axis of its array is. So a permutation moves no data, elementwise operators
compute in any order, and only an operator that needs another order transposes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax.numpy as jnp
from jax import Array

from pipeline.models.lowerings.problem.conv_window import Layout

NHWC = (0, 2, 3, 1)
"""Order of the axes of images, as axes of PyTorch's NCHW."""
CHWN = (1, 2, 3, 0)
"""Order with the batch last, so that the values of a vector register are of different samples."""
IMAGE_ORDERS: Mapping[Layout, tuple[int, ...]] = {"nhwc": NHWC, "chwn": CHWN}
"""Orders by the layout of a network. In both, axes 1 and 2 are height and width."""


@dataclass(frozen=True)
class TorchTensor:
    """An array, and PyTorch's number of each of its axes."""

    array: Array
    order: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.order)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in PyTorch's order."""
        sizes = dict(zip(self.order, self.array.shape, strict=True))
        return tuple(sizes[axis] for axis in range(self.ndim))

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def axis(self, number: int) -> int:
        """Return the index in `array` of PyTorch's axis. Raises ValueError if it is missing."""
        if not -self.ndim <= number < max(self.ndim, 1):
            raise ValueError(f"axis {number} of an array with {self.ndim} axes")
        return self.order.index(number % self.ndim)

    def axes(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the indices in `array` of PyTorch's axes."""
        return tuple(self.axis(number) for number in numbers)

    def transpose(self, order: Sequence[int]) -> Array:
        """Return the array with its axes in another order."""
        if tuple(order) == self.order:
            return self.array
        return jnp.transpose(self.array, [self.order.index(number) for number in order])

    def plain(self) -> Array:
        """Return the array with its axes in PyTorch's order."""
        return self.transpose(range(self.ndim))

    def with_array(self, array: Array) -> TorchTensor:
        """Return a tensor of another array in the same order."""
        return TorchTensor(array, self.order)


def to_tensor(array: Any) -> TorchTensor:
    """Return an array in PyTorch's order as a tensor."""
    array = jnp.asarray(array)
    return TorchTensor(array, tuple(range(array.ndim)))


def choose_image_order(x: TorchTensor) -> tuple[int, ...]:
    """Return the order in which images are computed: CHWN if they have it, else NHWC."""
    return CHWN if x.order == CHWN else NHWC


def move_batch_first(x: TorchTensor) -> TorchTensor:
    """Swap the batch, if it is the last axis, with the first axis."""
    if x.ndim < 2 or x.order[-1] != 0:
        return x
    order = (0, *x.order[1:-1], x.order[0])
    return TorchTensor(x.transpose(order), order)


def permute_axes(x: TorchTensor, numbers: Sequence[int]) -> TorchTensor:
    """Permute the axes, as `torch.permute`; no data is moved."""
    numbers = [x.order[x.axis(number)] for number in numbers]
    if sorted(numbers) != list(range(x.ndim)):
        raise ValueError(f"{tuple(numbers)} must be a permutation of {x.ndim} axes")
    return TorchTensor(x.array, tuple(numbers.index(number) for number in x.order))


def drop_axes(x: TorchTensor, removed: Sequence[int], array: Array) -> TorchTensor:
    """Return `array` as a tensor; its axes are x's without PyTorch's axes `removed`."""
    remaining = [number for number in x.order if number not in removed]
    order = (number - sum(axis < number for axis in removed) for number in remaining)
    return TorchTensor(array, tuple(order))


def align(operands: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return the arrays of operands that broadcast against each other, and their common order.

    Of the tensors with the most axes, the largest one determines the order. Numbers are returned
    unchanged.
    """
    tensors = [operand for operand in operands if isinstance(operand, TorchTensor)]
    if not tensors:
        return list(operands), ()
    ndim = max(tensor.ndim for tensor in tensors)
    order = max((tensor for tensor in tensors if tensor.ndim == ndim), key=count_values).order
    return [_add_axes(x, ndim, order) if isinstance(x, TorchTensor) else x for x in operands], order


def count_values(x: TorchTensor) -> int:
    """Return the number of values; a size that is unknown during an export counts as 2."""
    return math.prod(size if isinstance(size, int) else 2 for size in x.shape)


def _add_axes(x: TorchTensor, ndim: int, order: tuple[int, ...]) -> Array:
    """Return the array of x with `ndim` axes in an order; new leading axes have size 1."""
    if x.ndim == 0 or x.order == order:
        return x.array
    shape = (1,) * (ndim - x.ndim) + x.shape
    num_long_axes = sum(not (isinstance(size, int) and size == 1) for size in shape)
    if num_long_axes <= 1:
        # The values have the same sequence in every order of the axes.
        return x.array.reshape([shape[number] for number in order])
    return jnp.transpose(x.plain().reshape(shape), order)


def reshape_axes(x: TorchTensor, shape: Sequence[int]) -> TorchTensor:
    """Reshape as `torch.reshape` does.

    No data is transposed if the axes that are merged or split are adjacent in x and in PyTorch's
    order. Raises ValueError if x has another number of values than `shape`.
    """
    if not all(isinstance(size, int) for size in (*x.shape, *shape)):
        # The batch size is unknown while a program is exported.
        return to_tensor(x.plain().reshape(tuple(shape)))
    shape = _infer_shape(x.shape, tuple(shape))
    if 0 not in shape and x.order != tuple(range(x.ndim)):
        reshaped = _reshape_without_transpose(x, shape)
        if reshaped is not None:
            return reshaped
    return to_tensor(x.plain().reshape(shape))


def _infer_shape(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Return the new shape with -1 replaced. Raises ValueError unless the products are equal."""
    num_values = math.prod(old)
    product = math.prod(size for size in new if size != -1)
    if new.count(-1) == 1 and product > 0 and num_values % product == 0:
        new = tuple(num_values // product if size == -1 else size for size in new)
    if min(new, default=1) < 0 or math.prod(new) != num_values:
        raise ValueError(f"shape {old} can't become {new}")
    return new


def _group_axes(
    old: tuple[int, ...], new: tuple[int, ...]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of old axes and of the new axes with the same values, in order.

    No group has old axes of size 1. The shapes are without 0 and of equal products.
    """
    old_axes = [axis for axis, size in enumerate(old) if size != 1]
    new_axes = list(range(len(new)))
    while old_axes or new_axes:
        old_group: list[int] = []
        new_group: list[int] = []
        old_size = 1
        new_size = 1
        while old_size != new_size or not new_group:
            if old_size < new_size:
                old_group.append(old_axes.pop(0))
                old_size *= old[old_group[-1]]
            else:
                new_group.append(new_axes.pop(0))
                new_size *= new[new_group[-1]]
        yield old_group, new_group


def _reshape_without_transpose(x: TorchTensor, shape: tuple[int, ...]) -> TorchTensor | None:
    """Return the reshaped tensor if each group's old axes are adjacent in x, else None."""
    old_order = [number for number in x.order if x.shape[number] != 1]
    new_axes_by_start: list[tuple[int, list[int]]] = []
    for old_axes, new_axes in _group_axes(x.shape, shape):
        # Groups without old axes, which have size 1, come first.
        start = old_order.index(old_axes[0]) if old_axes else -1
        if old_axes and old_order[start : start + len(old_axes)] != old_axes:
            return None
        new_axes_by_start.append((start, new_axes))
    new_axes_by_start.sort(key=itemgetter(0))
    order = [axis for _, new_axes in new_axes_by_start for axis in new_axes]
    return TorchTensor(x.array.reshape([shape[axis] for axis in order]), tuple(order))
