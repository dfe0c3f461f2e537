"""The part of a recipe that names a device."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pipeline.backends.rates import Rates
from pipeline.core.registry import Spec
from pipeline.models.layers.precision import Level
from pipeline.training.parallel.parallel_spec import ParallelSpec

if TYPE_CHECKING:
    from pipeline.backends.base import Backend


class DeviceSpec(Spec):
    """Base of every device: the part of kind "device" that a recipe names."""

    auto_precision: ClassVar[Level] = "O0"
    """The level that `train.precision: auto` stands for on this device."""
    is_emulated: ClassVar[bool] = False
    """Whether a model computes the time of its steps, in one process."""
    uses_cuda: ClassVar[bool] = False
    """Whether its runs are on NVIDIA's GPUs, all of them in one process."""
    runs_populations: ClassVar[bool] = False
    """Whether runs of a sweep can share a program on it."""
    name: str

    def refuses(self, dtype: str) -> str | None:
        """Why the device can't compute in a type, and what to use instead; None if it can."""
        return None

    def refuses_devices(self, count: int) -> str | None:
        """Why a run can't have this number of such devices; None if it can."""
        return None

    def rates(self) -> Rates | None:
        """Return the rates of its devices; None if they are the measured ones of the host."""
        return None

    @abstractmethod
    def open(self, parallel: ParallelSpec) -> Backend:
        """Open the backend that compiles for this device. Raises RunError without one."""
