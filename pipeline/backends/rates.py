"""Rates of devices, and the modelled communication of emulated devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.core.errors import PipelineError

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


class GroupError(PipelineError):
    """Devices that can't be joined in a group."""

    exit_status = 2


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that communicate: `size` devices, whose numbers are `stride` apart."""

    size: int
    stride: int = 1


class Rates(Protocol):
    """Times of one device and of the links between devices. More work never takes less time."""

    @property
    def exposed_share(self) -> float:
        """Share of the gradients' all-reduce time that the backward pass doesn't hide.

        MindSpore's gamma (`costmodel_context.h`).
        """

    @property
    def scatters_sums(self) -> bool:
        """Whether a sum that is sharded is a reduce-scatter, not an all-reduce and a slice."""

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory of one device; infinite if unknown."""

    def slowdown(self, devices: int) -> float:
        """Return the factor on times if `devices` compute at once; 1 if they don't share cores."""

    def compute_us(self, flops: float, nbytes: float) -> float:
        """Return the microseconds of one kernel that computes `flops` and moves `nbytes`."""

    def collective_us(self, kind: CollectiveKind, nbytes: float, group: DeviceGroup) -> float:
        """Return the microseconds of a collective.

        `nbytes` is the size of a device's array after an all-gather, before any other collective.
        Raises GroupError for a group that the servers of these devices don't support.
        """


@dataclass(frozen=True)
class Communication:
    """Modelled all-reduces of the gradients in one step of several devices."""

    devices: int
    count: int
    """Number of all-reduces."""
    nbytes: int
    """Bytes of all all-reduces together."""
    all_reduce_ms: float
    """Time of all all-reduces together."""
    exposed_ms: float
    """Time in which the devices don't compute: they wait for an all-reduce or its launch."""
    step_ms: float

    @property
    def share(self) -> float:
        """`exposed_ms` as a share of `step_ms`."""
        return self.exposed_ms / self.step_ms

    def __str__(self) -> str:
        pieces = "" if self.count == 1 else f" in {self.count}"
        return (
            f"{self.nbytes / 1e6:,.1f} MB{pieces} over {self.devices:,} devices: "
            f"{self.all_reduce_ms:,.2f} ms; with launches {self.exposed_ms:,.2f} ms are exposed, "
            f"{self.share:.1%} of the step"
        )
