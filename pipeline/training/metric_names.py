"""Names of the standard metrics of an evaluation, and their better directions."""

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
"""Direction of better values of each metric. Precision, recall and f1 are macro averages."""
