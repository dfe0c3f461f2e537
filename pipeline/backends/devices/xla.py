"""Devices that XLA compiles for: parts of kind "device"."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeInt

from pipeline.backends.device_spec import DeviceSpec
from pipeline.models.layers.precision import Level
from pipeline.registry import part

if TYPE_CHECKING:
    from pipeline.backends.base import Backend


@part("device")
class Cpu(DeviceSpec):
    """The host's processor."""

    name: Literal["cpu"] = "cpu"

    def open(self) -> Backend:
        """XLA on the host."""
        from pipeline.backends.xla import XlaBackend, find_device

        return XlaBackend(find_device("cpu", 0))


@part("device")
class Gpu(DeviceSpec):
    """One NVIDIA GPU."""

    auto_precision: ClassVar[Level] = "O2"
    name: Literal["gpu"] = "gpu"
    index: NonNegativeInt
    """Index among the visible GPUs."""

    def open(self) -> Backend:
        """XLA on a GPU. Raises RunError where JAX sees none."""
        from pipeline.backends.xla import XlaBackend, find_device

        return XlaBackend(find_device("gpu", self.index))
