"""Rates of an emulated chip, as a planner of cuts asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import OptionError
from pipeline.backends.ascend.cost.collectives import Group, collective_us
from pipeline.backends.rates import CollectiveKind, DeviceGroup, GroupError


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

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory for parameters and activations."""
        hw = self.hardware
        return (hw.parameter_memory_gib + hw.feature_map_memory_gib) * 2**30

    def slowdown(self, devices: int) -> float:
        """Return 1: no two devices share a chip."""
        return 1.0

    def compute_us(self, flops: float, nbytes: float) -> float:
        """Microseconds of one kernel in float16 on the cubes."""
        hw = self.hardware
        cube = flops / 2 / (hw.peak_fp16_macs_per_us * self.cube_share)
        return max(cube, nbytes / 2 / hw.hbm_bytes_per_us)

    def collective_us(self, kind: CollectiveKind, nbytes: float, group: DeviceGroup) -> float:
        """Microseconds of a collective. Raises GroupError for a group that servers can't hold."""
        hw = self.hardware
        if group.size == 1:
            return 0.0
        in_server = max(1, int(hw.devices_per_server_count) // group.stride)
        try:
            linked = Group(group.size, min(group.size, in_server), group.stride)
        except OptionError as error:
            raise GroupError(str(error)) from error
        return hw.collective_launch_us + collective_us(kind, nbytes, linked, hw)
