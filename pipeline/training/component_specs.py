"""Components of a training step: loss, gradients, metrics, optimizer, schedule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from pipeline.core.registry import ComponentOf, Seq, Spec, components
from pipeline.data.targets import Targets, Task
from pipeline.training.metric_names import METRICS, Direction

if TYPE_CHECKING:
    import jax
    import optax

    from pipeline.training.curvature import CurvatureRule


class MetricSpec(Spec):
    """A metric of evaluations beside the standard ones: the component of kind "metric".

    It is computed from sums over all valid samples, so that it does not depend on how they are
    split into batches, shards and processes.
    """

    better: ClassVar[Direction] = "max"
    """Whether larger or smaller values are better, for checkpoint.best and early stop."""
    name: str

    def ignoring(self, label: int | None) -> Self:
        """Return the metric if `dataset.ignore_index` is this label; without labels it is the
        same."""
        return self

    @abstractmethod
    def zero(self, classes: int) -> Any:
        """Return the sums of no samples, for a network of that number of outputs: a pytree of
        arrays."""

    @abstractmethod
    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        """Return the sums over a batch, in the form of `zero`; they are added over all batches.

        Takes logits (B, ..., C) float32, labels (B, ...) int or (B, ..., C) float, and `mask`,
        bool (B,), of the valid samples: the others, which pad the batch, must add 0. With
        `dataset.ignore_index` every label is a sample, and those to ignore are not valid.
        """

    @abstractmethod
    def value(self, sums: Any) -> float:
        """Return the metric from the sums over all samples, as numpy arrays."""


def list_metric_directions(names: Iterable[str]) -> dict[str, Direction]:
    """Return the better direction by metric: of the standard ones, and of the metric components
    named."""
    component_names = [name for name in names if name not in METRICS]
    return {
        **METRICS,
        **{n: cast(type[MetricSpec], components("metric")[n]).better for n in component_names},
    }


Backward = Callable[[Any], tuple[Any, Any]]
"""(parameters) -> gradients of the loss like them, and auxiliary outputs."""


class GradientSpec(Spec):
    """How a step gets its gradients: the component of kind "gradients", a custom training step."""

    name: str

    @abstractmethod
    def build(self) -> Callable[[Backward, Any, jax.Array], tuple[Any, Any]]:
        """Return a function (backward, parameters, key) -> what `backward` returns.

        It may call `backward` several times, at other parameters, and change the gradients. The
        gradients are of the loss times the loss scale; with `train.accumulate_steps` and in shards
        the function is called for each part of the batch, whose gradients are added. `key` is a JAX
        key, another one for each step and part.
        """


Reduction = Literal["mean", "sum", "none"]
"""The loss of a batch: the mean or the sum over its samples; or neither, as in MindSpore: the
gradient is the sum's, and the reported loss of a step is the mean."""


class LossSpec(Spec):
    """The loss, which training minimises: the component of kind "loss"."""

    tasks: ClassVar[tuple[Task, ...]] = (
        *("classification", "regression", "multi_label", "next_token"),
    )
    """Tasks that it is a loss for."""
    masks_labels: ClassVar[bool] = False
    """Whether the function takes `where` too, bool (B, ...), which marks the valid labels."""
    name: str
    reduction: Reduction
    hardest_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Reduce only this share of each batch, the samples with the largest losses."""

    @property
    def counts_classes(self) -> bool:
        """Whether `fit_to_targets` needs the number of training labels of each class."""
        return False

    def fit_to_targets(self, targets: Targets) -> Self:
        """Return the loss for these targets. Raises ValueError if it does not fit them."""
        return self

    @abstractmethod
    def build(self) -> Callable[..., Any]:
        """Return a function (logits (B, ..., C), labels (B, ...) int or (B, ..., C) float) -> loss
        per sample (B,); a sample has one label, or one at each of its positions."""


def list_losses(task: Task) -> list[str]:
    """Return the names of the losses for what is predicted."""
    losses = cast(Mapping[str, type[LossSpec]], components("loss"))
    return [name for name, loss in losses.items() if task in loss.tasks]


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
    """An optimizer, from gradients to updates: the component of kind "optimizer"."""

    observes_layers: ClassVar[bool] = False
    """Whether `update` takes `curvature`, sums of the inputs and output gradients of layers."""
    name: str
    lr: PositiveFloat
    weight_decay: NonNegativeFloat
    decay_rules: Seq[DecayRule]
    """The last rule that covers a parameter wins over `weight_decay`."""

    @abstractmethod
    def build(self) -> optax.GradientTransformation:
        """Return gradients -> descent direction, before the learning rate: p <- p - lr * direction.

        The learning rate is not baked in, so that one compiled program serves every value of it.
        """

    def curvature(self) -> CurvatureRule | None:
        """Return the sums of layers that `update` needs; None if `observes_layers` is false."""
        return None


class ScheduleSpec(Spec):
    """The learning rate of every update: the component of kind "schedule"."""

    name: str

    def warmup(self, steps_per_epoch: int) -> int:
        """Return the length of warmup in steps; 0 for a schedule without one."""
        return 0

    @abstractmethod
    def table(self, lr: float, steps: int, steps_per_epoch: int) -> np.ndarray:
        """Return the learning rate of each of `steps` updates, float32.

        Raises ValueError if there is no such table.
        """


class UnfreezeRule(Spec):
    """Frozen parameters that are trained after some epochs, or steps, of the run."""

    pattern: Annotated[str, Field(min_length=1)]
    """As of `train.freeze`; * is all."""
    after_passes: PositiveInt | None = None
    after_steps: PositiveInt | None = None

    @model_validator(mode="after")
    def _says_when(self) -> Self:
        if (self.after_passes is None) == (self.after_steps is None):
            raise ValueError("give after_passes or after_steps, one of them")
        if self.pattern.startswith("!"):
            raise ValueError(
                f"pattern = {self.pattern}: must be of what is trained then, without a !"
            )
        return self

    def start(self, steps_per_epoch: int) -> int:
        """Return the number of steps before them."""
        if self.after_passes is not None:
            return self.after_passes * steps_per_epoch
        assert self.after_steps is not None, "one of both is given"
        return self.after_steps


class RateRule(Spec):
    """The learning rate of the parameters that a pattern covers: `factor` times a schedule's."""

    pattern: str
    factor: NonNegativeFloat = 1.0
    schedule: Annotated[ScheduleSpec, ComponentOf("schedule")] | None = None
    """A schedule for these parameters, of the same `train.optimizer.lr`; null: the main one."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_fields_set & {"factor", "schedule"}:
            raise ValueError("give factor, schedule or both")
        return self
