"""Arrays whose axes lie in another order than PyTorch numbers them.

PyTorch's images are NCHW; convolutions here are fast in NHWC. A `Laid` array keeps the axes as they
lie and the number that PyTorch gives each, so that a permutation moves no data, elementwise
operators compute in any order, and only what needs another order transposes.
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
"""Orders by the layout of a network. Height and width are axes 1 and 2 in both."""


@dataclass(frozen=True)
class Laid:
    """An array, and for each of its axes the number that PyTorch gives it."""

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
        """Return where the axis of this number lies. Raises ValueError for one it does not have."""
        if not -self.ndim <= number < max(self.ndim, 1):
            raise ValueError(f"axis {number} of an array with {self.ndim} axes")
        return self.order.index(number % self.ndim)

    def axes(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return where axes lie."""
        return tuple(self.axis(number) for number in numbers)

    def lying(self, order: Sequence[int]) -> Array:
        """Return the array with its axes in an order."""
        order = tuple(order)
        if order == self.order:
            return self.array
        return jnp.transpose(self.array, tuple(self.order.index(number) for number in order))

    def plain(self) -> Array:
        """Return the array with its axes in PyTorch's order."""
        return self.lying(range(self.ndim))

    def same(self, array: Array) -> Laid:
        """Return another array that lies in the same order."""
        return Laid(array, self.order)


def laid(array: Any) -> Laid:
    """Return an array that lies in PyTorch's order."""
    array = jnp.asarray(array)
    return Laid(array, tuple(range(array.ndim)))


def image_order(x: Laid) -> tuple[int, ...]:
    """Return the order to compute images in: CHWN where they lie so, else NHWC."""
    return CHWN if x.order == CHWN else NHWC


def batch_first(x: Laid) -> Laid:
    """Return an array whose samples lie last with its channels there; other ones unchanged."""
    if x.ndim < 2 or x.order[-1] != 0:
        return x
    order = (0, *x.order[1:-1], x.order[0])
    return Laid(x.lying(order), order)


def permuted(x: Laid, numbers: Sequence[int]) -> Laid:
    """Permute the axes, as `torch.permute`; no data is moved."""
    numbers = [x.order[x.axis(number)] for number in numbers]
    if sorted(numbers) != list(range(x.ndim)):
        raise ValueError(f"{tuple(numbers)} is no permutation of {x.ndim} axes")
    return Laid(x.array, tuple(numbers.index(number) for number in x.order))


def without_axes(x: Laid, removed: Sequence[int], array: Array) -> Laid:
    """Return `array`, which is x without the axes of these numbers, as reductions leave it."""
    kept = [number for number in x.order if number not in removed]
    return Laid(array, tuple(number - sum(gone < number for gone in removed) for number in kept))


def aligned(operands: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return operands that broadcast against each other as they lie, and their common order.

    The order is that of the largest operand with the most axes. Others are transposed, which is
    free for factors of one value a channel. Numbers stay as they are.
    """
    arrays = [operand for operand in operands if isinstance(operand, Laid)]
    if not arrays:
        return list(operands), ()
    axes = max(array.ndim for array in arrays)
    order = max((a for a in arrays if a.ndim == axes), key=extent).order
    found = [_spread(each, axes, order) if isinstance(each, Laid) else each for each in operands]
    return found, order


def extent(x: Laid) -> int:
    """Return the number of values, one that is unknown while a program is exported being 2."""
    return math.prod(size if isinstance(size, int) else 2 for size in x.shape)


def _spread(x: Laid, axes: int, order: tuple[int, ...]) -> Array:
    """Return x with leading axes of size 1, in an order."""
    if x.ndim == 0:
        return x.array
    if x.ndim == axes and x.order == order:
        return x.array
    shape = (1,) * (axes - x.ndim) + x.shape
    if sum(not (isinstance(size, int) and size == 1) for size in shape) <= 1:
        return x.array.reshape([shape[number] for number in order])
    return jnp.transpose(x.plain().reshape(shape), order)


def reshaped(x: Laid, shape: Sequence[int]) -> Laid:
    """Reshape as `torch.reshape`, without a transposition where the axes allow it.

    Each axis that is split, and each run of axes that are merged and lie side by side in their
    order, is reshaped as it lies. Raises ValueError where the sizes don't fit.
    """
    if not all(isinstance(size, int) for size in (*x.shape, *shape)):
        # A batch size that is unknown while a program is exported.
        return laid(x.plain().reshape(tuple(shape)))
    shape = _filled(x.shape, tuple(shape))
    groups = _groups(x.shape, shape)
    if groups is not None and x.order != tuple(range(x.ndim)):
        in_place = _reshaped_as_it_lies(x, shape, groups)
        if in_place is not None:
            return in_place
    return laid(x.plain().reshape(shape))


def _filled(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Return the new shape with -1 replaced."""
    size = math.prod(old)
    known = math.prod(each for each in new if each != -1)
    if new.count(-1) == 1 and known > 0 and size % known == 0:
        new = tuple(size // known if each == -1 else each for each in new)
    if min(new, default=1) < 0 or math.prod(new) != size:
        raise ValueError(f"shape {old} can't become {new}")
    return new


_Group = tuple[list[int], list[int]]
"""Old axes and the new ones that hold the same values."""


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[_Group] | None:
    """Return the smallest groups of axes, left to right; axes of size 1 are in none of the old.

    None where there are empty axes.
    """
    if 0 in old:
        return None
    groups: list[_Group] = []
    left = [axis for axis, size in enumerate(old) if size != 1]
    right = list(range(len(new)))
    while left or right:
        group: _Group = ([], [])
        sizes = [1, 1]
        while sizes[0] != sizes[1] or not (group[0] or group[1]):
            side = 0 if (sizes[0] < sizes[1] or not right) else 1
            side = 0 if side == 1 and not right else side
            waiting = (left, right)[side]
            if not waiting:
                return None
            axis = waiting.pop(0)
            group[side].append(axis)
            sizes[side] *= (old, new)[side][axis]
        groups.append(group)
    return groups


def _reshaped_as_it_lies(x: Laid, shape: tuple[int, ...], groups: list[_Group]) -> Laid | None:
    """Return the result where each group's old axes lie side by side in their order, else None."""
    lying = [number for number in x.order if x.shape[number] != 1]
    starts: list[tuple[int, list[int]]] = []
    for old, new in groups:
        at = lying.index(old[0]) if old else -1
        if old and lying[at : at + len(old)] != old:
            return None
        starts.append((at, new))
    # Axes of size 1 that no old axis gave lie first.
    order = [number for _, new in sorted(starts, key=lambda start: start[0]) for number in new]
    return Laid(x.array.reshape([shape[number] for number in order]), tuple(order))
