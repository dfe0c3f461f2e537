"""An emulated Ascend 910, a component of kind "device"."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from pipeline.backends.ascend.chip.hardware import Chip, extract_hardware, to_priced_chip
from pipeline.backends.ascend.chip.options import (
    MAX_DEVICES,
    EmulatedDevice,
    ExecutionConfig,
    OptionError,
)
from pipeline.backends.ascend.chip.software import find_stack
from pipeline.backends.ascend.cost.collectives import AscendRates, check_devices
from pipeline.backends.device_spec import DeviceSpec
from pipeline.backends.rates import Rates
from pipeline.core.registry import FilePath, Seq, component
from pipeline.models.layers.precision import Level
from pipeline.training.parallel.parallel_spec import ParallelSpec

if TYPE_CHECKING:
    from pipeline.backends.base import Backend


@component("device")
class Ascend(Chip, DeviceSpec):
    """An emulated Ascend 910: XLA computes on the host, a model of the chip estimates the time."""

    auto_precision: ClassVar[Level] = "O3"
    is_emulated: ClassVar[bool] = True
    name: Literal["ascend"] = "ascend"
    mode: Literal["auto", "op_by_op", "graph_sink", "loop_sink"]
    """Launch mode of steps; auto: by `train.sink` and `train.sink_size`."""
    software: str | None
    """Stack whose launches and conversions are priced: mindspore_graph, mindspore_eager or
    pytorch_eager, or one with its version (mindspore_graph@1.8); null: MindSpore's, in the launch
    mode."""
    precision: Literal["O0", "O1", "O2", "O3"] | None
    """Level of mixed precision of the priced step, O1 as in apex, others as in MindSpore; null: the
    step's own types."""
    all_reduce_fusion: Annotated[Seq[PositiveInt], Field(min_length=1)] | None
    """Indices of parameters at which gradients are split into all-reduces; null: one for all."""
    host_workers: PositiveInt
    """Processes of the emulated host that prepare data."""
    auto_tune: Literal["exhaustive", "ga", "rl", "rl,ga"] | None
    """Search for the tiles of every product: of all tiles, genetic, in a tree, or the last two."""
    tune_bank: FilePath | None
    """The knowledge bank of tiles, read before the search and written after it; null: the bank in
    the folder TUNE_BANK_PATH, if any."""
    repeat_tune: bool
    """Whether to search again for tiles that a bank has, and use the faster tiles (REPEAT_TUNE)."""
    strict: bool
    """Whether to refuse an unsupported operation instead of estimating it by its bytes."""

    @field_validator("software")
    @classmethod
    def _refuse_unknown_software(cls, software: str | None) -> str | None:
        if software is not None:
            find_stack(software)
        return software

    @field_validator("all_reduce_fusion")
    @classmethod
    def _refuse_unsorted(cls, points: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if points is not None and any(low >= high for low, high in pairwise(points)):
            raise ValueError(f"{list(points)} must ascend, as in [85, 160]")
        return points

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
