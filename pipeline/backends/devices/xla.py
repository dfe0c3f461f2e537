"""Devices that XLA compiles for: parts of kind "device"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, NonNegativeInt

from pipeline.backends.device_spec import DeviceSpec
from pipeline.core.registry import part
from pipeline.models.layers.precision import Level
from pipeline.training.parallel.parallel_spec import ParallelSpec

if TYPE_CHECKING:
    from pipeline.backends.base import Backend


@part("device")
class Cpu(DeviceSpec):
    """The host's processor."""

    runs_populations: ClassVar[bool] = True
    name: Literal["cpu"] = "cpu"

    def open(self, parallel: ParallelSpec) -> Backend:
        """XLA on the host, whose processor can stand for several devices."""
        from pipeline.backends.xla import XlaBackend
        from pipeline.training.parallel.devices import leave_gpus_alone, place

        leave_gpus_alone()
        return XlaBackend(place(self.name, 0, parallel))


@part("device")
class Gpu(DeviceSpec):
    """NVIDIA GPUs, or one that is described and not there."""

    auto_precision: ClassVar[Level] = "bf16"
    uses_cuda: ClassVar[bool] = True
    name: Literal["gpu"] = "gpu"
    index: NonNegativeInt
    """Index among the visible GPUs, if one is used."""
    target: str | None
    """A chip to compile for that need not be there: h200, or a YAML file of a chip's figures."""
    graphs: Annotated[
        Literal["auto", "off", "step", "loop"],
        # YAML reads an unquoted `off` as false.
        BeforeValidator(lambda graphs: "off" if graphs is False else graphs),
    ]
    """CUDA graphs. auto: as XLA has them, parts of a step without convolutions; step: all of a
    step; loop: a whole sink; off: none."""
    deterministic: bool
    """Only algorithms whose results are the same in every run on one GPU; slower ones, at times."""

    def open(self, parallel: ParallelSpec) -> Backend:
        """XLA on one GPU or several. Raises RunError if JAX sees fewer."""
        from pipeline.backends.gpu.chip_target import read_target
        from pipeline.backends.gpu.gpu_backend import AbsentGpuBackend, GpuBackend
        from pipeline.training.parallel.devices import leave_gpus_alone, place, place_host

        if self.target is not None:
            leave_gpus_alone()
            return AbsentGpuBackend(
                read_target(self.target),
                place_host(parallel),
                self.graphs,
                deterministic=self.deterministic,
            )
        devices = place(self.name, self.index, parallel)
        return GpuBackend(devices, self.graphs, deterministic=self.deterministic)
