"""PyTorch's tensors as arrays of JAX, whose axes may be in another order.

PyTorch's images are NCHW, but convolutions are faster in NHWC. A `TorchTensor` has PyTorch's number
of each axis. A permutation moves no data, elementwise operators compute in any order, and only an
operator that needs another order transposes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from pipeline.models.lowerings.problem.image_layout import Layout

NHWC = (0, 2, 3, 1)
"""Order of the axes of images: those numbered 0, 2, 3, 1 in PyTorch's NCHW."""
CHWN = (1, 2, 3, 0)
"""Order with the batch innermost, in which vectors consist of samples."""
IMAGE_ORDERS: Mapping[Layout, tuple[int, ...]] = {"nhwc": NHWC, "chwn": CHWN}
"""Orders by the layout of a network, both with height and width as axes 1 and 2."""


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
    """Return `array`, which is x without PyTorch's axes `removed`, as a tensor."""
    remaining = [number for number in x.order if number not in removed]
    order = (number - sum(axis < number for axis in removed) for number in remaining)
    return TorchTensor(array, tuple(order))


def align(operands: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return operands that broadcast against each other, and their common order.

    It is the order of the largest among the tensors with the most axes. Others are transposed.
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
    if sum(not (isinstance(size, int) and size == 1) for size in shape) <= 1:
        return x.array.reshape([shape[number] for number in order])
    return jnp.transpose(x.plain().reshape(shape), order)


def reshape_axes(x: TorchTensor, shape: Sequence[int]) -> TorchTensor:
    """Reshape as `torch.reshape`, without a transposition if possible.

    It is possible if each group of merged axes is adjacent and in PyTorch's order. Raises
    ValueError for an impossible shape.
    """
    if not all(isinstance(size, int) for size in (*x.shape, *shape)):
        # The batch size is unknown while a program is exported.
        return to_tensor(x.plain().reshape(tuple(shape)))
    shape = _infer_shape(x.shape, tuple(shape))
    groups = _group_axes(x.shape, shape)
    if groups is not None and x.order != tuple(range(x.ndim)):
        in_place = _reshape_in_place(x, shape, groups)
        if in_place is not None:
            return in_place
    return to_tensor(x.plain().reshape(shape))


def _infer_shape(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Return the new shape with -1 replaced."""
    size = math.prod(old)
    product = math.prod(axis for axis in new if axis != -1)
    if new.count(-1) == 1 and product > 0 and size % product == 0:
        new = tuple(size // product if axis == -1 else axis for axis in new)
    if min(new, default=1) < 0 or math.prod(new) != size:
        raise ValueError(f"shape {old} can't become {new}")
    return new


_Group = tuple[list[int], list[int]]
"""Old axes, and the new axes of the same values."""


def _group_axes(old: tuple[int, ...], new: tuple[int, ...]) -> list[_Group] | None:
    """Return the smallest groups, in order; old axes of size 1 are in none. None for empty axes."""
    if 0 in old:
        return None
    groups: list[_Group] = []
    old_axes = [axis for axis, size in enumerate(old) if size != 1]
    new_axes = list(range(len(new)))
    while old_axes or new_axes:
        group: _Group = ([], [])
        sizes = [1, 1]
        while sizes[0] != sizes[1] or not (group[0] or group[1]):
            side = 0 if sizes[0] < sizes[1] or not new_axes else 1
            axes = (old_axes, new_axes)[side]
            if not axes:
                return None
            axis = axes.pop(0)
            group[side].append(axis)
            sizes[side] *= (old, new)[side][axis]
        groups.append(group)
    return groups


def _reshape_in_place(
    x: TorchTensor, shape: tuple[int, ...], groups: list[_Group]
) -> TorchTensor | None:
    """Return the reshaped tensor if each group's old axes are adjacent in x, else None."""
    order = [number for number in x.order if x.shape[number] != 1]
    starts: list[tuple[int, list[int]]] = []
    for old, new in groups:
        start = order.index(old[0]) if old else -1
        if old and order[start : start + len(old)] != old:
            return None
        starts.append((start, new))
    # New axes of size 1 come first.
    order = [number for _, new in sorted(starts, key=lambda start: start[0]) for number in new]
    return TorchTensor(x.array.reshape([shape[number] for number in order]), tuple(order))
