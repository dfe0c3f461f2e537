"""Names of the standard metrics of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Direction = Literal["max", "min"]

METRICS: Mapping[str, Direction] = MappingProxyType(
    {
        "accuracy": "max",
        "top5": "max",
        "loss": "min",
        "precision": "max",
        "recall": "max",
        "f1": "max",
    }
)
"""The better direction of each standard metric; the last three are macro averages."""
