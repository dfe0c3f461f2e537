"""The part of a recipe that spreads training over several devices, and shards of a batch.

Shards are equal parts whose gradients are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from pipeline.core.host.launchers import LaunchName
from pipeline.core.registry import FilePath, Seq, Spec

MAX_DEVICES = 1 << 14
"""The largest number of devices, or of shards, in a recipe."""
Axis = Literal["data", "model"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""Axes of a mesh. Along `data` devices have different samples. Along `model` they have different
slices of a layer's arrays."""
DATA, MODEL = AXES

Size = Annotated[int, Field(gt=0, le=MAX_DEVICES)]

Timeout = Annotated[float, Field(gt=0, le=24 * 3600)]
"""A time in seconds, at most a day."""
DEFAULT_SHARDS = 8
"""Default number of shards of a batch. Results are the same on 1, 2, 4 and 8 devices."""


class MeshSpec(Spec):
    """Numbers of devices along the axes of a mesh."""

    data: Size = 1
    model: Size = 1


class ShardingSpec(Spec):
    """Axes of the mesh that shard the dimensions of parameters, or of results of layers.

    `axes` has an entry for each dimension: an axis, a list of axes, or null if the dimension isn't
    sharded. A pattern for parameters covers a path and all paths below it, as in `freeze`. A
    pattern for layers covers the layer's path alone.
    """

    pattern: Annotated[str, Field(min_length=1)]
    axes: Seq[Axis | Seq[Axis] | None]

    @model_validator(mode="after")
    def _require_axes_once(self) -> ShardingSpec:
        axes = [axis for entry in self.entries for axis in entry]
        if len(set(axes)) != len(axes):
            raise ValueError("axes: an axis can shard only one dimension")
        return self

    @property
    def entries(self) -> tuple[tuple[Axis, ...], ...]:
        """The axes that shard each dimension."""
        axes = (entry or () for entry in self.axes)
        return tuple((entry,) if isinstance(entry, str) else entry for entry in axes)


class ParallelSpec(Spec):
    """Training on several devices: their number, their shares, and how reproducible results are."""

    mode: Literal["none", "data", "fsdp", "semi_auto", "auto"]
    """none: one device; data: each device takes a part of every batch; fsdp: each also stores only
    a part of the parameters and of the optimizer's state; semi_auto: parameters are sharded by
    `specs`; auto: a search finds the fastest of these plans."""
    devices: Size | None
    """Devices of all processes together; null: the number in `mesh`, else one for each process."""
    mesh: MeshSpec | None
    """Devices by axis; null: all along `data`."""
    shards: Size | None
    """With `exact`, the number of parts of a batch whose gradients are added in a fixed order. It
    must be a multiple of the number of devices. null: the largest common divisor of 8 and the batch
    size, or the number of devices if that is larger."""
    reproducible: Literal["exact", "layout", "close"] | None
    """exact: the same bits on any number of devices and processes; layout: the same bits on equal
    numbers of devices and processes; close: the same results except for rounding. null: layout with
    semi_auto and auto, else exact."""
    sync_batch_norm: bool
    """Whether batch norm uses statistics of the whole batch, not of shards. Not with `exact`."""
    mirror_mean: bool
    """Whether gradients of devices are averaged, else added. Named by an old key of MindSpore."""
    batch_per_device: PositiveInt | None
    """Batch size of one device, as MindSpore counts it; replaces `train.batch_size`."""
    specs: Seq[ShardingSpec]
    """Shardings of parameters. The last rule that covers a parameter applies. Only with
    semi_auto."""
    constraints: Seq[ShardingSpec]
    """Shardings of results of layers, by the layer's path. Only with semi_auto."""
    batch_axes: Annotated[Seq[Axis], Field(min_length=1)]
    """Axes that shard the samples of a batch."""
    memory_gib: Annotated[float, Field(gt=0)] | None
    """Memory of a device that `auto` plans with; null: the chip's memory, or no limit."""
    plan: FilePath | None
    """A plan of `auto` to use instead of a search."""

    @property
    def is_data_parallel(self) -> bool:
        """Whether each device computes with all parameters, on a part of every batch."""
        return self.mode in ("data", "fsdp")

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices along each axis; 1 if the recipe doesn't set the number."""
        if self.mesh is not None:
            return {DATA: self.mesh.data, MODEL: self.mesh.model}
        return {DATA: self.devices or 1, MODEL: 1}

    @property
    def batch_parts(self) -> int:
        """Parts of a batch, one for each device along the batch axes."""
        return prod(self.mesh_sizes[axis] for axis in self.batch_axes)

    @property
    def num_devices(self) -> int:
        """Devices of all processes together; 1 if the recipe doesn't set the number."""
        return prod(self.mesh_sizes.values())


class LaunchSpec(Spec):
    """Processes of one run: how they are started, and how long they wait for each other.

    `local` starts `processes` on this machine. `env`, `jax`, `mpi`, `skypilot` and `slurm` read
    this process's rank from the variables of that launcher, `auto` from any launcher's.
    `none` doesn't read a rank.
    """

    name: Literal["auto", "local", "none"] | LaunchName
    processes: PositiveInt | None
    """Processes that `local` starts; null: 2."""
    restarts: NonNegativeInt
    """Most restarts of `local` from the last checkpoint, each after a process has died."""
    min_processes: PositiveInt | None
    """Fewest processes with which `local` restarts without those that died; null: it starts as many
    as before."""
    start_seconds: Timeout | None
    """Seconds that processes wait for each other to start; null: 60 on one machine, else 1,800."""
    heartbeat_seconds: Timeout
    """Seconds without a heartbeat after which a process is treated as dead."""
    stuck_seconds: Timeout
    """Seconds that processes wait for a process that runs but doesn't answer."""
    end_seconds: Timeout
    """Seconds that processes have to end after the first one has ended."""

    @property
    def num_processes(self) -> int:
        return self.processes or 2


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
