"""Calibration by published steps: multipliers on groups of classes, and time between tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import CostClass
from pipeline.backends.ascend.cost.efficiency import Efficiency, load_efficiency
from pipeline.core.errors import RunError

CALIBRATION_FILE = Path(__file__).with_name("calibration.yaml")

GROUPS: Mapping[str, tuple[CostClass, ...]] = MappingProxyType(
    {
        "products": ("conv", "conv_input_grad", "conv_kernel_grad", "matmul"),
        "windows": ("max_pool", "max_pool_grad", "avg_pool"),
        "normalisation": ("bn_reduce", "bn_update"),
        "depthwise": ("depthwise", "depthwise_input_grad", "depthwise_kernel_grad"),
    }
)
"""Classes that share a multiplier; those in no group keep the rates fitted to kernels."""

TRACED = ("products", "windows")
"""Groups whose kernels were timed, in more than one network."""


@dataclass(frozen=True)
class Calibration:
    """Parameters fitted to published steps, on top of those fitted to kernels.

    `multipliers` are of the rates of groups. `task_us` is the time of every task of a graph beyond
    that of single kernels. `log_sd` is the spread of log(published / modelled) over held-out
    families, `interval_scale` the factor that makes an 80 % interval cover 80 % of them.
    """

    efficiency: Efficiency
    multipliers: Mapping[str, float]
    task_us: float
    log_sd: float
    interval_scale: float

    def adjusted(self, hardware: Hardware) -> Hardware:
        """Return the chip with the fitted time between tasks."""
        return replace(hardware, task_gap_us=hardware.task_gap_us + self.task_us)


def calibrate_with(
    multipliers: Mapping[str, float],
    task_us: float,
    log_sd: float = 0.2,
    interval_scale: float = 1.0,
    kernels: Efficiency | None = None,
) -> Calibration:
    """Return a calibration from its parameters; kernels' constants are those of the package."""
    by_class: dict[str, float] = {
        name: multipliers[group] for group in GROUPS for name in GROUPS[group]
    }
    efficiency = (kernels or load_efficiency()).scaled(by_class)
    return Calibration(efficiency, dict(multipliers), task_us, log_sd, interval_scale)


@cache
def load_calibration(path: Path = CALIBRATION_FILE) -> Calibration:
    """Return the calibration that comes with the package. Raises RunError for an invalid file."""
    try:
        fitted: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return calibrate_with(
            {group: float(fitted["multipliers"][group]) for group in GROUPS},
            float(fitted["task_us"]),
            float(fitted["log_sd"]),
            float(fitted["interval_scale"]),
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: not a calibration: {error!r}") from error
