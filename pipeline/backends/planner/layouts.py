"""Layouts of arrays on a mesh, and the collectives that change a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from pipeline.backends.rates import CollectiveKind

Layout = tuple[int | None, ...]
"""The dimension or group that each axis of a mesh shards; None: the axis shards nothing."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Numbers of devices along `data` and `model`. Devices along `model` have adjacent numbers."""

    data: int
    model: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of devices along the axes, in the order of AXES."""
        return self.data, self.model

    @property
    def devices(self) -> int:
        return self.data * self.model

    def count_along(self, axes: Sequence[int]) -> int:
        return prod(self.sizes[axis] for axis in axes)

    def count_pieces(self, layout: Layout) -> int:
        return self.count_along([axis for axis, dim in enumerate(layout) if dim is not None])

    def __str__(self) -> str:
        return f"{self.data} x {self.model}"


def list_meshes(devices: int) -> tuple[Mesh, ...]:
    """Return all meshes of a number of devices, by descending size along `data`."""
    return tuple(
        Mesh(devices // model, model) for model in range(1, devices + 1) if devices % model == 0
    )


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of the devices along some axes."""

    kind: CollectiveKind
    nbytes: float
    """Size of a device's array, after an all-gather and before any other collective."""
    axes: tuple[int, ...]


@lru_cache(maxsize=1 << 16)
def list_layouts(sizes: tuple[int, ...], mesh: Mesh, samples: int | None) -> tuple[Layout, ...]:
    """Return all layouts of dimensions of some sizes; the first one shards nothing.

    `data` shards the dimension `samples` or nothing, `model` any dimension or nothing. An axis of
    one device shards nothing. All pieces are equal, since compiled programs require it.
    """
    data = (None,) if mesh.data == 1 or samples is None else (None, samples)
    model = (None,) if mesh.model == 1 else (None, *range(len(sizes)))
    return tuple(
        layout
        for layout in product(data, model)
        if all(size % count_pieces(layout, mesh, dim) == 0 for dim, size in enumerate(sizes))
    )


def count_pieces(layout: Layout, mesh: Mesh, *dims: int) -> int:
    """Return the number of pieces that a layout divides some dimensions into."""
    return prod(size for size, dim in zip(mesh.sizes, layout, strict=True) if dim in dims)


def convert_region_layout(layout: Layout, groups: Sequence[int | None]) -> Layout:
    """Return the layout of an array whose dimensions have these groups, in a region's layout."""
    dims = {group: dim for dim, group in enumerate(groups) if group is not None}
    return tuple(None if group is None else dims.get(group) for group in layout)


@lru_cache(maxsize=1 << 16)
def find_transfer(
    source: Layout, partial: tuple[int, ...], target: Layout, nbytes: float, mesh: Mesh
) -> tuple[Collective, ...]:
    """Return the collectives that bring an array from one layout to another.

    `nbytes` is the size of the complete array. Along the axes `partial`, devices have terms of a
    sum. Slices come first, since they need no communication and leave smaller arrays; gathers come
    last. Axes that are scattered, summed or gathered together have one collective.
    """
    steps: list[Collective] = []
    axes = range(len(source))
    if _is_copied_to_all(source, target):
        sharded = tuple(axis for axis in axes if source[axis] is not None)
        steps.append(Collective("all_gather", nbytes, sharded))
        source = (None,) * len(source)
    nbytes /= mesh.count_pieces(source)
    for axis in axes:
        if source[axis] is None and target[axis] is not None and axis not in partial:
            nbytes /= mesh.sizes[axis]
    scattered = tuple(axis for axis in partial if target[axis] is not None)
    if scattered:
        steps.append(Collective("reduce_scatter", nbytes, scattered))
        nbytes /= mesh.count_along(scattered)
    summed = tuple(axis for axis in partial if target[axis] is None)
    if summed:
        steps.append(Collective("all_reduce", nbytes, summed))
    steps += [
        Collective("all_to_all", nbytes, (axis,))
        for axis in axes
        if source[axis] is not None and target[axis] not in (None, source[axis])
    ]
    by_dim: dict[int, list[int]] = {}
    for axis in axes:
        dim = source[axis]
        if dim is not None and target[axis] is None:
            by_dim.setdefault(dim, []).append(axis)
    for gathered in by_dim.values():
        nbytes *= mesh.count_along(gathered)
        steps.append(Collective("all_gather", nbytes, tuple(gathered)))
    return tuple(steps)


def _is_copied_to_all(source: Layout, target: Layout) -> bool:
    """Return whether XLA copies an array to all devices to change its layout.

    XLA copies ("involuntary full rematerialization") if both axes shard the same dimension in one
    layout, and in the other layout `data`, the outer axis, shards neither that dimension nor the
    dimension that `model` shards.
    """

    def is_stacked_against(layout: Layout, other: Layout) -> bool:
        data, model = layout
        return data is not None and data == model and other[0] not in (data, other[1])

    return is_stacked_against(source, target) or is_stacked_against(target, source)
