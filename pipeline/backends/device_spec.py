"""The base of components that name a device."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pipeline.core.registry import Spec
from pipeline.models.layers.precision import Level
from pipeline.training.parallel.parallel_spec import ParallelSpec

if TYPE_CHECKING:
    from pipeline.backends.base import Backend
    from pipeline.backends.rates import Rates


class DeviceSpec(Spec):
    """Base of every device: the component of kind "device" that a recipe names."""

    auto_precision: ClassVar[Level] = "O0"
    """The level that `train.precision: auto` stands for on this device."""
    is_emulated: ClassVar[bool] = False
    """Whether step times are modelled, not measured. Such a run has one process."""
    uses_cuda: ClassVar[bool] = False
    """Whether the devices are NVIDIA GPUs. A process uses all GPUs of its machine."""
    runs_populations: ClassVar[bool] = False
    """Whether several runs of a sweep can be computed by one program."""
    name: str

    def find_dtype_problem(self, dtype: str) -> str | None:
        """Return why the device can't compute in a dtype, and a remedy; None if it can."""
        return None

    def find_count_problem(self, count: int) -> str | None:
        """Return why a run can't have `count` of these devices; None if it can."""
        return None

    def rates(self) -> Rates | None:
        """Return the rates of devices and links; None for the measured rates of the host."""
        return None

    @abstractmethod
    def open(self, parallel: ParallelSpec) -> Backend:
        """Open the backend that compiles for this device. Raises RunError if none exists."""
