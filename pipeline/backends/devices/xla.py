"""Devices that XLA compiles for: components of kind "device"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, NonNegativeInt

from pipeline.backends.device_spec import DeviceSpec
from pipeline.core.registry import component
from pipeline.models.layers.precision import Level
from pipeline.training.parallel.parallel_spec import ParallelSpec

if TYPE_CHECKING:
    from pipeline.backends.base import Backend


@component("device")
class Cpu(DeviceSpec):
    """The host's processor."""

    runs_populations: ClassVar[bool] = True
    name: Literal["cpu"] = "cpu"

    def open(self, parallel: ParallelSpec) -> Backend:
        """Open XLA on the host's processor, which can act as several devices."""
        from pipeline.backends.xla import XlaBackend
        from pipeline.training.parallel.devices import hide_gpus, make_placement

        hide_gpus()
        return XlaBackend(make_placement(self.name, 0, parallel))


@component("device")
class Gpu(DeviceSpec):
    """NVIDIA GPUs. Programs for an absent chip (`target`) are compiled and can't run."""

    auto_precision: ClassVar[Level] = "bf16"
    uses_cuda: ClassVar[bool] = True
    name: Literal["gpu"] = "gpu"
    index: NonNegativeInt
    """Index among the visible GPUs, for a run on a single GPU."""
    target: str | None
    """Absent chip to compile for: h200, or a YAML file of a chip's figures; null for none."""
    graphs: Annotated[
        Literal["auto", "off", "step", "loop"],
        # YAML reads an unquoted `off` as false.
        BeforeValidator(lambda graphs: "off" if graphs is False else graphs),
    ]
    """CUDA graphs. auto: XLA's choice, which captures parts of a step that have no convolution;
    step: each step as one graph; loop: all steps of a launch (a sink) as one graph; off: none."""
    deterministic: bool
    """Whether to use only algorithms whose results repeat bit for bit; some are slower."""

    def find_target_problem(self) -> str | None:
        """Return what is wrong with `target`; None if nothing is."""
        from pipeline.backends.gpu.chip_target import read_target

        try:
            if self.target is not None:
                read_target(self.target)
        except ValueError as error:
            return str(error)
        return None

    def open(self, parallel: ParallelSpec) -> Backend:
        """Open GPUs, or a compiler for the absent `target`. Raises RunError if GPUs are missing."""
        from pipeline.backends.gpu.chip_target import read_target
        from pipeline.backends.gpu.gpu_backend import AbsentGpuBackend, GpuBackend
        from pipeline.training.parallel.devices import (
            hide_gpus,
            make_host_placement,
            make_placement,
        )

        if self.target is not None:
            hide_gpus()
            target = read_target(self.target)
            host = make_host_placement(parallel)
            return AbsentGpuBackend(target, host, self.graphs, deterministic=self.deterministic)
        devices = make_placement(self.name, self.index, parallel)
        return GpuBackend(devices, self.graphs, deterministic=self.deterministic)
