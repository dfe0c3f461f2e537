"""An emulated Ascend 910: XLA computes the numbers, a model of the device computes the time.

    from pipeline.backends.ascend import price

Data flow: a function and its shapes -> `Graph` (backends/graph) -> `TaskGraph` (compiler) -> a
`TaskTime` for each task (cost) -> a `Timeline` for a launch mode (simulate) -> `Report`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.backends.ascend.chip.hardware import PricedChip
    from pipeline.backends.ascend.pricing.pricing import chipset, price
    from pipeline.backends.ascend.report.report import Report

__all__ = ["PricedChip", "Report", "chipset", "price"]


def __getattr__(name: str) -> Any:
    """Import a name at its first use, so that recipes are checked without jax."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeline.backends.ascend.pricing import pricing

    return getattr(pricing, name)
