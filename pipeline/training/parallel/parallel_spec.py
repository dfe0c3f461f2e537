"""The part of a recipe that spreads training over several devices."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveInt, model_validator

from pipeline.core.registry import FilePath, Seq, Spec

MAX_DEVICES = 1 << 14
Axis = Literal["data", "model"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""Axes of a mesh: devices along `data` train on other samples, along `model` they share a layer."""
DATA, MODEL = AXES

Size = Annotated[int, Field(gt=0, le=MAX_DEVICES)]


Timeout = Annotated[float, Field(gt=0, le=24 * 3600)]
"""A time in seconds, at most a day."""


class MeshSpec(Spec):
    """Numbers of devices along the axes of a mesh."""

    data: Size = 1
    model: Size = 1


class ShardingSpec(Spec):
    """Axes of the mesh that shard the dimensions of parameters, or of what layers compute.

    `axes` has one entry for each dimension: an axis, several, or null where it is replicated. As in
    `freeze`, a pattern of parameters covers a path or all below it; one of layers covers a path.
    """

    pattern: Annotated[str, Field(min_length=1)]
    axes: Seq[Axis | Seq[Axis] | None]

    @model_validator(mode="after")
    def _each_axis_once(self) -> ShardingSpec:
        named = [axis for entry in self.entries for axis in entry]
        if len(set(named)) != len(named):
            raise ValueError("axes: an axis shards one dimension only")
        return self

    @property
    def entries(self) -> tuple[tuple[Axis, ...], ...]:
        """The axes that shard each dimension."""
        return tuple(
            () if entry is None else (entry,) if isinstance(entry, str) else entry
            for entry in self.axes
        )


class ParallelSpec(Spec):
    """Several devices: how many, what each computes, and which bits are promised."""

    mode: Literal["none", "data", "semi_auto", "auto"]
    """none: one device; data: each device takes a part of every batch; semi_auto: also shard
    parameters by `specs`; auto: search for the fastest of these plans."""
    devices: Size | None
    """Devices of all processes together; null: those of `mesh`, else one for each process."""
    mesh: MeshSpec | None
    """Devices by axis; null: all along `data`."""
    shards: Size | None
    """Parts of a batch whose gradients are added in a fixed order, with `exact`; null: 8, or as
    many equal parts below that as a batch has, or the number of devices where that is more. The
    number of devices must divide it."""
    reproducible: Literal["exact", "layout", "close"]
    """exact: the same bits on any number of devices and processes; layout: on the same number of
    both; close: within rounding."""
    sync_batch_norm: bool
    """Batch statistics of the whole batch instead of those of each shard; not with `exact`."""
    mirror_mean: bool
    """Whether gradients of devices are averaged, else added."""
    batch_per_device: PositiveInt | None
    """Batch of one device, as the documents say it (8 x 32); replaces `train.batch_size`."""
    specs: Seq[ShardingSpec]
    """Shardings of parameters by pattern; the last matching rule wins. Only with semi_auto."""
    constraints: Seq[ShardingSpec]
    """Shardings of what layers compute, by the layer's path. Only with semi_auto."""
    batch_axes: Annotated[Seq[Axis], Field(min_length=1)]
    """Axes that shard the samples of a batch."""
    memory_gib: Annotated[float, Field(gt=0)] | None
    """Most memory of a device that `auto` plans with; null: that of the chip, or any."""
    plan: FilePath | None
    """A plan of `auto` to take instead of searching."""

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices along each axis, as far as the recipe says; one device where it doesn't."""
        if self.mesh is not None:
            return {DATA: self.mesh.data, MODEL: self.mesh.model}
        return {DATA: self.devices or 1, MODEL: 1}

    @property
    def batch_parts(self) -> int:
        """Parts of a batch, as far as the recipe says."""
        return prod(self.mesh_sizes[axis] for axis in self.batch_axes)

    @property
    def num_devices(self) -> int:
        """Devices of all processes together, as far as the recipe says."""
        return prod(self.mesh_sizes.values())


DEFAULT_PROCESSES = 2
"""Processes that `local` starts if the recipe doesn't set them."""


class LaunchSpec(Spec):
    """Processes of one run: who starts them, and how long they wait for each other.

    `local` starts `processes` on this machine. `slurm` and `env` take the place that a launcher
    gave this process: Slurm's variables, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. `auto`
    takes what it finds, `none` nothing.
    """

    name: Literal["auto", "local", "slurm", "env", "none"]
    processes: PositiveInt | None
    """Processes that `local` starts; null: 2."""
    start_seconds: Timeout
    """How long processes wait for each other to start."""
    heartbeat_seconds: Timeout
    """After how long without a sign of life a process counts as gone."""
    stuck_seconds: Timeout
    """How long processes wait for one that lives but does not answer."""
    end_seconds: Timeout
    """How long the other processes may take to end once the first of them has."""
