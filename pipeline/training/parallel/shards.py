"""Shards of a batch: equal parts whose gradients are added."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from pipeline.training.parallel.parallel_spec import DATA, ParallelSpec

DEFAULT_SHARDS = 8
"""Default number of shards of a batch. Results are the same on 1, 2, 4 and 8 devices."""


@dataclass(frozen=True)
class Shards:
    """The split of a batch, and the order in which the gradients of its parts are added.

    Device d of `devices` has the shards d * per_device .. (d + 1) * per_device - 1. `axis` is the
    axis of `shard_map` that the step runs in; None on one device.
    """

    count: int
    devices: int = 1
    axis: str | None = None
    add: Literal["tree", "psum"] = "tree"
    """The order of additions. tree: it depends only on `count`; psum: as in XLA's all-reduce."""
    factor: int = 1
    """Factor on the gradients: 1 if the recipe averages devices' gradients, else their number."""
    sync_batch_norm: bool = False
    """Whether batch norm uses the statistics of all devices together."""
    at_once: int = 1
    """Shards that a device computes at once, a divisor of `per_device`; results are the same."""

    @property
    def per_device(self) -> int:
        return self.count // self.devices


def make_shards(parallel: ParallelSpec, batch_size: int, devices: int) -> Shards | None:
    """Return the shards of a batch on a number of devices; None if the batch isn't split. Raises
    ValueError if the number of shards isn't a multiple of the number of devices."""
    axis = DATA if devices > 1 else None
    factor = 1 if parallel.mirror_mean else parallel.num_devices
    if parallel.is_data_parallel and parallel.reproducible == "exact":
        count = count_shards(parallel, batch_size)
        if count % devices:
            raise ValueError(f"{count} shards can't be divided among {devices} devices")
        if count == 1:
            return None
        return Shards(count, devices, axis, add="tree", factor=factor)
    if parallel.is_data_parallel and devices > 1:
        sync_batch_norm = parallel.sync_batch_norm
        return Shards(
            devices, devices, axis, add="psum", factor=factor, sync_batch_norm=sync_batch_norm
        )
    return None


def count_shards(parallel: ParallelSpec, batch_size: int) -> int:
    """Return the recipe's number of shards. By default it is the largest divisor of 8 that divides
    the batch size, or the number of devices if that is larger."""
    return parallel.shards or max(gcd(DEFAULT_SHARDS, batch_size), parallel.num_devices)
