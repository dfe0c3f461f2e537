"""What a recipe says of a device."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from pipeline.registry import Spec

if TYPE_CHECKING:
    from pipeline.backends.base import Backend


class DeviceSpec(Spec):
    """Base of every device: the part of kind "device" that a recipe names."""

    name: str

    def refuses(self, dtype: str) -> str | None:
        """Why activations can't be of a type on this device, and what can be; None: they can."""
        return None

    @abstractmethod
    def open(self) -> Backend:
        """The backend that compiles for this device. Raises RunError where there is none."""
