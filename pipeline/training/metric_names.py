"""Names of the standard metrics of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

METRICS: Mapping[str, Literal["max", "min"]] = MappingProxyType(
    {
        "accuracy": "max",
        "top5": "max",
        "loss": "min",
        "precision": "max",
        "recall": "max",
        "f1": "max",
    }
)
"""Standard metrics, and the better direction; the last three are macro averages."""

Direction = Literal["max", "min"]
