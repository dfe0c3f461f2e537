"""Names of the standard metrics of an evaluation, and whether larger values are better."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Direction = Literal["max", "min"]
"""max: larger values of a metric are better; min: smaller ones."""

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
"""The better direction of each standard metric. Precision, recall and f1 are macro averages."""
