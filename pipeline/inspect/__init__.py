"""Profiles, forecasts, autopsies, dumps, comparisons and reports of a run or a step.

from pipeline.inspect import forecast_step, profile_step
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.inspect.custom_step import forecast_step, profile_step

__all__ = ["forecast_step", "profile_step"]


def __getattr__(name: str) -> Any:
    """Import a function at its first use, so that commands start without importing jax."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("pipeline.inspect.custom_step"), name)
