"""An emulated Ascend 910, a component of kind "device"."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pipeline.backends.ascend.chip.hardware import Chip, extract_hardware, to_priced_chip
from pipeline.backends.ascend.chip.options import (
    MAX_DEVICES,
    EmulatedDevice,
    EmulationOptions,
    ExecutionConfig,
    OptionError,
)
from pipeline.backends.ascend.cost.collectives import AscendRates, check_devices
from pipeline.backends.device_spec import DeviceSpec
from pipeline.backends.rates import Rates
from pipeline.core.registry import component
from pipeline.models.layers.precision import Level
from pipeline.training.parallel.parallel_spec import ParallelSpec

if TYPE_CHECKING:
    from pipeline.backends.base import Backend


@component("device")
class Ascend(EmulationOptions, Chip, DeviceSpec):
    """An emulated Ascend 910: XLA computes on the host, a model of the chip estimates the time."""

    auto_precision: ClassVar[Level] = "O3"
    is_emulated: ClassVar[bool] = True
    name: Literal["ascend"] = "ascend"

    def find_dtype_problem(self, dtype: str) -> str | None:
        """Return the problem of a type that isn't in the chip's file."""
        if dtype in self.dtypes:
            return None
        return (
            f"{self.chip} supports {', '.join(self.dtypes)}, not {dtype}; train in O0, and choose "
            "device.precision=O2 for float16"
        )

    def find_count_problem(self, count: int) -> str | None:
        """Return the problem of a number of devices above 1,024, or not of whole servers."""
        if count > MAX_DEVICES:
            return f"must be at most {MAX_DEVICES} for {self.chip}"
        try:
            check_devices(count, extract_hardware(self))
        except OptionError as error:
            return str(error).removeprefix(f"devices = {count}: ")
        return None

    def rates(self) -> Rates:
        return AscendRates(extract_hardware(self))

    def open(self, parallel: ParallelSpec) -> Backend:
        """Open XLA on the host's processor, under the name of the chip."""
        from pipeline.backends.ascend.backend import AscendBackend

        config = ExecutionConfig(
            precision=self.precision,
            software=self.software,
            fusion=self.all_reduce_fusion,
            host_workers=self.host_workers,
            auto_tune=self.auto_tune,
            tune_bank=None if self.tune_bank is None else str(self.tune_bank),
            repeat_tune=self.repeat_tune,
            strict=self.strict,
        )
        mode = None if self.mode == "auto" else self.mode
        return AscendBackend(EmulatedDevice(to_priced_chip(self), config, mode), parallel)
