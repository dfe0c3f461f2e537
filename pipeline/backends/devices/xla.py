"""Devices that XLA compiles for: parts of kind "device"."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeInt

from pipeline.backends.device_spec import DeviceSpec
from pipeline.models.layers.precision import Level
from pipeline.parallel.parallel_spec import ParallelSpec
from pipeline.registry import part

if TYPE_CHECKING:
    from pipeline.backends.base import Backend


@part("device")
class Cpu(DeviceSpec):
    """The host's processor."""

    name: Literal["cpu"] = "cpu"

    def open(self, parallel: ParallelSpec) -> Backend:
        """XLA on the host, whose processor can stand for several devices."""
        from pipeline.backends.xla import XlaBackend
        from pipeline.parallel.devices import place

        return XlaBackend(place("cpu", 0, parallel))


@part("device")
class Gpu(DeviceSpec):
    """NVIDIA GPUs."""

    auto_precision: ClassVar[Level] = "O2"
    name: Literal["gpu"] = "gpu"
    index: NonNegativeInt
    """Index among the visible GPUs, where one is used."""

    def open(self, parallel: ParallelSpec) -> Backend:
        """XLA on one GPU or several. Raises RunError where JAX sees fewer."""
        from pipeline.backends.xla import XlaBackend
        from pipeline.parallel.devices import place

        return XlaBackend(place("gpu", self.index, parallel))
