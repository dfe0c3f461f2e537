"""Callbacks in a recipe."""

from __future__ import annotations

from abc import abstractmethod

from pipeline.core.registry import Spec
from pipeline.engine.callbacks.callback import Callback, OnFailure


class CallbackSpec(Spec):
    """A callback in a recipe: the part of kind "callback"."""

    name: str
    on_failure: OnFailure = "end"

    def require_ready(self) -> None:
        """Check that the callback can work in this process, before any data is read.

        Raises ValueError with what to do, such as the package to install.
        """

    @abstractmethod
    def build(self) -> Callback:
        """The callback, new for every run."""
