"""Rates of a device: how long it computes, and how long collectives take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import yaml

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.cost.collectives import Group, collective_us
from pipeline.errors import RunError
from pipeline.planner.layouts import Kind

HOST_RATES_FILE = Path(__file__).with_name("host_rates.yaml")


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that communicate with one another: `size` of them, `stride` apart."""

    size: int
    stride: int = 1


class Rates(Protocol):
    """Times of one device and of the links between devices. All of them grow with their sizes."""

    @property
    def exposed_share(self) -> float:
        """Share of the time of gradients' all-reduces that the backward pass does not hide.

        MindSpore's gamma (`costmodel_context.h`).
        """

    @property
    def scatters_sums(self) -> bool:
        """Whether a sum of which each device keeps a piece is a reduce-scatter.

        XLA for CPUs all-reduces and slices instead.
        """

    def compute_us(self, flops: float, nbytes: float) -> float:
        """Microseconds of one kernel that computes `flops` and moves `nbytes`."""

    def collective_us(self, kind: Kind, nbytes: float, group: DeviceGroup) -> float:
        """Microseconds of a collective; `nbytes` as in `layouts.Collective`."""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Time of collectives between devices: that of a message, and bytes a second.

    A ring of n carries (n - 1) / n of the bytes in an all-gather, a reduce-scatter or an
    all-to-all, and twice that in an all-reduce, which also takes twice the messages.
    """

    message_us: float
    bytes_per_us: float

    def us(self, kind: Kind, nbytes: float, size: int) -> float:
        """Microseconds of a collective over `size` devices."""
        if size == 1:
            return 0.0
        rounds = 2 if kind == "all_reduce" else 1
        return rounds * (self.message_us + nbytes * (size - 1) / size / self.bytes_per_us)


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Two measured rates of a CPU or GPU, and those of its links.

    A kernel takes the longer of the times of its operations and of its bytes (the roofline).
    Groups within `per_server` neighbouring devices use `links`, others `far_links`.
    """

    flops_per_us: float
    bytes_per_us: float
    links: LinkRates
    far_links: LinkRates
    per_server: int = 8
    exposed_share: float = 1.0
    scatters_sums: bool = False

    def compute_us(self, flops: float, nbytes: float) -> float:
        """Microseconds of one kernel."""
        return max(flops / self.flops_per_us, nbytes / self.bytes_per_us)

    def collective_us(self, kind: Kind, nbytes: float, group: DeviceGroup) -> float:
        """Microseconds of a collective over the slowest links of its group."""
        near = group.size * group.stride <= self.per_server
        return (self.links if near else self.far_links).us(kind, nbytes, group.size)


@dataclass(frozen=True, slots=True)
class AscendRates:
    """Rates of an Ascend chip: its cubes and memory, and HCCL's formulas for its links.

    Sizes are those of float32 arrays, of which the chip computes and moves halves; gradients are
    all-reduced in float32.
    """

    hardware: Hardware
    cube_share: float = 0.5
    """Share of the cubes' peak in products of a training step; assumed."""
    exposed_share: float = 1.0
    """1 for one all-reduce after the backward pass; 0.63 with MindSpore's [85, 160] on ResNet-50,
    by its published 23.61 and 22.00 ms, of which 4.40 are the all-reduce."""
    scatters_sums: bool = True

    def compute_us(self, flops: float, nbytes: float) -> float:
        """Microseconds of one kernel in float16 on the cubes."""
        hw = self.hardware
        cube = flops / 2 / (hw.peak_fp16_macs_per_us * self.cube_share)
        return max(cube, nbytes / 2 / hw.hbm_bytes_per_us)

    def collective_us(self, kind: Kind, nbytes: float, group: DeviceGroup) -> float:
        """Microseconds of a collective. Raises OptionError for a group that servers can't hold."""
        hw = self.hardware
        if group.size == 1:
            return 0.0
        in_server = max(1, int(hw.devices_per_server_count) // group.stride)
        linked = Group(group.size, min(group.size, in_server), group.stride)
        return hw.collective_launch_us + collective_us(kind, nbytes, linked, hw)


@cache
def host_rates(links: str = "in_process", path: Path = HOST_RATES_FILE) -> MeasuredRates:
    """Return the rates of a host's devices, as they were measured; `links` names their links.

    Raises RunError for a file that has not what it should.
    """
    try:
        given: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        rate = LinkRates(**{k: float(given[links][k]["value"]) for k in _LINK_KEYS})
        return MeasuredRates(
            flops_per_us=float(given["device"]["flops_per_us"]["value"]),
            bytes_per_us=float(given["device"]["bytes_per_us"]["value"]),
            links=rate,
            far_links=rate,
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: no rates of a host: {error!r}") from error


_LINK_KEYS = ("message_us", "bytes_per_us")
