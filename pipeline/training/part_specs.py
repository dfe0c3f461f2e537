"""Recipe parts of a training step: loss, optimizer, learning-rate schedule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from pipeline.registry import PartOf, Seq, Spec

if TYPE_CHECKING:
    import optax


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
"""Evaluation metrics that a recipe can name, and the better direction; the last three are macro
averages."""


Reduction = Literal["mean", "sum", "none"]
"""The loss of a batch: the mean or the sum over its samples; or none of both, as in MindSpore: the
gradient is that of the sum, and the loss of a step is reported as the mean (L-01)."""


class LossSpec(Spec):
    """The loss, which training minimises: the part of kind "loss"."""

    masks_labels: ClassVar[bool] = False
    """Whether the function takes `where` too, bool (B, ...), which marks the valid labels."""
    name: str
    reduction: Reduction
    hardest_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Reduce only this share of each batch, the samples with the largest losses (M-13)."""

    @abstractmethod
    def build(self) -> Callable[..., Any]:
        """A function (logits (B, ..., C), labels (B, ...) int or (B, ..., C) float) -> loss per
        sample (B,); a sample has one label, or one at each of its positions."""


class DecayRule(Spec):
    """Weight decay for the parameters that a pattern covers, such as `conv_0/bias` or `conv_0`."""

    pattern: str
    weight_decay: NonNegativeFloat


class AverageSpec(Spec):
    """An exponential moving average of the weights, which evaluations use."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None
    """Share of the average that each update keeps; null: there is no average."""
    warmup: bool
    """After n updates keep no more than (1 + n) / (10 + n), as TensorFlow's
    ExponentialMovingAverage does with `num_updates`."""


class OptimizerSpec(Spec):
    """An optimizer, from gradients to updates: the part of kind "optimizer"."""

    observes_layers: ClassVar[bool] = False
    """Whether `update` takes `observed`, the inputs and output gradients of layers."""
    name: str
    lr: PositiveFloat
    weight_decay: NonNegativeFloat
    decay_rules: Seq[DecayRule]
    """The last rule that covers a parameter wins over `weight_decay`."""

    @abstractmethod
    def build(self) -> optax.GradientTransformation:
        """Gradients -> descent direction, before the learning rate: p <- p - lr * direction.

        The learning rate is not baked in, so that one compiled program serves every value of it.
        """


class ScheduleSpec(Spec):
    """The learning rate of every update: the part of kind "schedule"."""

    name: str

    def warmup(self, steps_per_pass: int) -> int:
        """The length of warmup in steps; 0 for a schedule without one."""
        return 0

    @abstractmethod
    def table(self, lr: float, steps: int, steps_per_pass: int) -> np.ndarray:
        """The learning rate of each of `steps` updates, float32 (L-03).

        Raises ValueError where there is no such table.
        """


class RateRule(Spec):
    """The learning rate of the parameters that a pattern covers: `factor` times a schedule's."""

    pattern: str
    factor: NonNegativeFloat = 1.0
    schedule: Annotated[ScheduleSpec, PartOf("schedule")] | None = None
    """A schedule for these parameters, of the same `train.optimizer.lr`; null: that of all."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_fields_set & {"factor", "schedule"}:
            raise ValueError("give factor, schedule or both")
        return self
