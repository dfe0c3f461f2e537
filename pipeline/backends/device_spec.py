"""What a recipe says of a device."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pipeline.models.layers.precision import Level
from pipeline.registry import Spec

if TYPE_CHECKING:
    from pipeline.backends.base import Backend


class DeviceSpec(Spec):
    """Base of every device: the part of kind "device" that a recipe names."""

    auto_precision: ClassVar[Level] = "O0"
    """What `train.precision: auto` stands for here."""
    name: str

    def refuses(self, dtype: str) -> str | None:
        """Why activations can't be of a type on this device, and what can be; None: they can."""
        return None

    @abstractmethod
    def open(self) -> Backend:
        """The backend that compiles for this device. Raises RunError where there is none."""
