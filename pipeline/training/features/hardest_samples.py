"""The loss over the samples of a batch whose losses are largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jax import Array

from pipeline.training.masks import top_share_mask
from pipeline.training.step_feature import StepFeature


@dataclass(frozen=True)
class HardestSamples(StepFeature):
    """Reduces the loss over the share of a batch's samples whose losses are largest."""

    name: ClassVar[str] = "hardest_samples"
    share: float

    def select_samples(self, losses: Array, valid: Array) -> Array:
        return top_share_mask(losses, self.share, valid)
