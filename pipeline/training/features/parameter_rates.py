"""Learning rates that differ between parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jax import Array

from pipeline.models.layers.path_patterns import covers
from pipeline.training.step_feature import StepFeature


@dataclass(frozen=True)
class RateGroups(StepFeature):
    """Groups of parameters with separate columns of the learning rates: a pattern for each column
    after the first. The last pattern that covers a parameter applies, else the first column."""

    name: ClassVar[str] = "rate_groups"
    patterns: tuple[str, ...]

    def find_rate(self, path: tuple[str, ...], rate: Array) -> Array:
        columns = range(1, len(self.patterns) + 1)
        covering = [
            column
            for column, pattern in zip(columns, self.patterns, strict=True)
            if covers(pattern, path)
        ]
        return rate[covering[-1] if covering else 0]


@dataclass(frozen=True)
class LayerRates(StepFeature):
    """Factors on the learning rates by the outermost scope of a parameter's path."""

    name: ClassVar[str] = "layer_rates"
    factors: Mapping[str, float]

    def find_rate(self, path: tuple[str, ...], rate: Array) -> Array:
        factor = self.factors.get(path[0], 1.0)
        return rate if factor == 1.0 else rate * factor
