"""Components of a training step: loss, gradients, metrics, optimizer, schedule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast, get_args

import numpy as np
from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    model_validator,
)

from pipeline.core.registry import ComponentOf, Seq, Spec, list_components
from pipeline.data.columns import Column, Targets, Task
from pipeline.training.metric_names import METRICS, Direction

if TYPE_CHECKING:
    import jax
    import optax

    from pipeline.training.features.curvature import CurvatureRule


class MetricSpec(Spec):
    """A metric of evaluations, besides the standard ones: the component of kind "metric".

    Its value is computed from sums over all valid samples, so it is the same for any division of
    the samples into batches, shards and processes.
    """

    better: ClassVar[Direction] = "max"
    """Whether larger or smaller values are better, for checkpoint.best and early stop."""
    name: str

    def ignore_label(self, label: int | None) -> Self:
        """Return the metric that leaves out labels equal to `label`, if it isn't None. This base
        class returns the metric unchanged."""
        return self

    def fit_to_samples(self, labels: Sequence[Column], outputs: tuple[int, ...]) -> Self:
        """Return the metric for the labels of each split that is evaluated, (n, ...), and for the
        shape of a sample's outputs. This base class returns the metric unchanged."""
        return self

    @abstractmethod
    def zero(self, classes: int) -> Any:
        """Return sums of zero samples, a pytree of arrays, for a network of `classes` outputs."""

    @abstractmethod
    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        """Return the sums over a batch, in the form of `zero`. They are added over all batches.

        Takes logits (B, ..., C) float32, labels (B, ...) int or (B, ..., C) float, and `mask`, bool
        (B,), of the valid samples. Samples that pad the batch must add 0. With
        `dataset.ignore_index` the entries of B are labels, not samples, and `mask` is False for
        ignored labels.
        """

    @abstractmethod
    def value(self, sums: Any) -> float:
        """Return the metric, from the sums over all samples as numpy arrays."""


def list_metric_directions(names: Iterable[str]) -> dict[str, Direction]:
    """Return for each standard metric, and each component in `names`, whether larger or smaller
    values are better."""
    directions = dict(METRICS)
    for name in names:
        if name not in METRICS:  # Standard metrics need no components, which take time to load.
            directions[name] = cast(type[MetricSpec], list_components("metric")[name]).better
    return directions


Backward = Callable[[Any], tuple[Any, Any]]
"""(parameters) -> gradients of the loss, in the form of the parameters, and auxiliary outputs."""


class GradientSpec(Spec):
    """A way to compute the gradients of a step: the component of kind "gradients"."""

    name: str

    @abstractmethod
    def build(self) -> Callable[[Backward, Any, jax.Array], tuple[Any, Any]]:
        """Return a function (backward, parameters, key) -> (gradients, auxiliary outputs).

        The function can call `backward` several times, with other parameters, and change the
        gradients that it returns. These are gradients of the loss times the loss scale. With
        `train.accumulate_steps` or shards, the function is called for each part of the batch, and
        the results are added. `key` is a JAX key that differs for each step and part.
        """


Reduction = Literal["mean", "sum", "none"]
"""How the losses of samples are reduced to the loss of a batch. With none, as in MindSpore,
gradients belong to the sum, and the reported loss is the mean."""


class LossSpec(Spec):
    """The loss, which training minimises: the component of kind "loss"."""

    tasks: ClassVar[tuple[Task, ...]] = get_args(Task)
    """Tasks that the loss supports."""
    compares_samples: ClassVar[bool] = False
    """Whether the loss of a sample depends on the others of its batch, so that no step may compute
    the batch in parts."""
    masks_labels: ClassVar[bool] = False
    """Whether the function also takes `where`, bool (B, ...), the mask of the valid labels."""
    reads_logits: ClassVar[bool] = False
    """Whether the loss takes the softmax or the sigmoid of the outputs."""
    name: str
    reduction: Reduction
    hardest_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each batch that the loss is reduced over: the samples with the largest losses."""

    def choose_task(self, task: Task) -> Task:
        """Return the task that the loss trains on labels of a dataset with this task."""
        return task

    @property
    def needs_class_counts(self) -> bool:
        """Whether `fit_to_targets` needs the number of training labels of each class."""
        return False

    @property
    def needs_targets(self) -> bool:
        """Whether `describe_targets` reads the training labels."""
        return False

    def describe_targets(self, targets: Targets, labels: np.ndarray) -> tuple[Targets, str]:
        """Return the targets with what the loss needs of the training labels, (n, ...), and a line
        for the log, or an empty text. Raises ValueError for labels that the loss doesn't take."""
        return targets, ""

    def fit_to_targets(self, targets: Targets) -> Self:
        """Return the loss with its settings for these targets. Raises ValueError if the loss
        doesn't fit them."""
        return self

    @abstractmethod
    def build(self) -> Callable[..., Any]:
        """Return a function (logits, labels) -> losses (B,). Logits are (B, ..., C), labels (B,
        ...) int or (B, ..., C) float: one label for each sample, or for each position of a
        sample."""


def list_losses(task: Task) -> list[str]:
    """Return the names of the losses for a task."""
    losses = cast(Mapping[str, type[LossSpec]], list_components("loss"))
    return [name for name, loss in losses.items() if task in loss.tasks]


class DecayRule(Spec):
    """Weight decay for the parameters that a pattern covers, such as `conv_0/bias` or `conv_0`."""

    pattern: str
    weight_decay: NonNegativeFloat


class AverageSpec(Spec):
    """An exponential moving average of the weights, which evaluations use."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None
    """Weight of the old average in each new one; null: no average."""
    warmup: bool
    """Whether `decay` is limited to (1 + n) / (10 + n) after n updates, as in TensorFlow's
    ExponentialMovingAverage with `num_updates`."""


class IterateAverage(Spec):
    """The average of an optimizer's iterates that schedule-free training evaluates (Defazio et al.
    2024). Update k = 1, 2, ... has the weight k^step_power * (largest rate so far)^rate_power."""

    b1: Annotated[float, Field(ge=0, lt=1)]
    """Share of the average in the point at which gradients are computed."""
    rate_power: NonNegativeFloat
    step_power: NonNegativeFloat


class OptimizerSpec(Spec):
    """An optimizer, which turns gradients into updates: the component of kind "optimizer"."""

    observes_layers: ClassVar[bool] = False
    """Whether `update` takes `curvature`, sums of the inputs and output gradients of layers."""
    averages_iterates: ClassVar[bool] = False
    """Whether evaluations use an average of the iterates, and gradients are taken near it."""
    name: str
    lr: PositiveFloat
    lr_for_batch: PositiveInt | None = Field(default=None, exclude=True)
    """The batch size that `lr` is for. The learning rate is lr * batch_size / lr_for_batch (Goyal
    et al. 2017, "Accurate, Large Minibatch SGD", sec. 2.1); null: it is `lr` for every batch
    size. In a checked recipe `lr` is scaled, and this is null."""
    weight_decay: NonNegativeFloat
    decay_rules: Seq[DecayRule]
    """Exceptions to `weight_decay`; the last rule that covers a parameter applies."""
    _base_batch: int | None = PrivateAttr(default=None)

    @property
    def base_batch(self) -> int | None:
        """The `lr_for_batch` by which `lr` was scaled; None if it wasn't."""
        return self._base_batch

    def scale_rate(self, batch_size: int) -> Self:
        """Return the optimizer with the learning rate for a batch of `batch_size` samples."""
        if self.lr_for_batch is None:
            return self
        lr = self.lr * batch_size / self.lr_for_batch
        scaled = self.model_copy(update={"lr": lr, "lr_for_batch": None})
        scaled._base_batch = self.lr_for_batch
        return scaled

    def unscale_rate(self, rate: float, batch_size: int) -> float:
        """Return the `lr` from which `scale_rate` computes `rate`, rounded to 12 digits."""
        if self._base_batch is None:
            return rate
        return float(f"{rate * self._base_batch / batch_size:.12g}")

    @abstractmethod
    def build(self) -> optax.GradientTransformation:
        """Return a transformation: gradients -> direction, for p <- p - lr * direction. It doesn't
        include the learning rate, so one compiled program can be used with every rate."""

    def curvature(self) -> CurvatureRule | None:
        """Return which sums over layers `update` needs; None if `observes_layers` is false."""
        return None

    def iterate_average(self) -> IterateAverage | None:
        """Return the average of the iterates; None if `averages_iterates` is false."""
        return None


class ScheduleSpec(Spec):
    """The learning rate of every update: the component of kind "schedule"."""

    name: str

    def warmup(self, steps_per_epoch: int) -> int:
        """Return the length of warmup in steps; 0 for a schedule without warmup."""
        return 0

    @abstractmethod
    def table(self, lr: float, steps: int, steps_per_epoch: int) -> np.ndarray:
        """Return the learning rate of each of `steps` updates, float32 (steps,). Raises ValueError
        if the settings are invalid for a run of this length."""

    def fingerprint_file(self) -> Mapping[str, Any] | None:
        """Return shape, dtype and sha256 of the file that has the learning rates; None without one.
        Raises ValueError if it can't be read."""
        return None


class UnfreezeRule(Spec):
    """Frozen parameters that are trained after some epochs or steps of the run."""

    pattern: Annotated[str, Field(min_length=1)]
    """A pattern as in `train.freeze`; * covers all parameters."""
    after_epochs: PositiveInt | None = None
    after_steps: PositiveInt | None = None

    @model_validator(mode="after")
    def _require_one_time(self) -> Self:
        if (self.after_epochs is None) == (self.after_steps is None):
            raise ValueError("set exactly one of after_epochs and after_steps")
        if self.pattern.startswith("!"):
            raise ValueError(
                f"pattern = {self.pattern}: must name the parameters to train, without a !"
            )
        return self

    def start(self, steps_per_epoch: int) -> int:
        """Return the number of steps after which the parameters are trained."""
        if self.after_epochs is not None:
            return self.after_epochs * steps_per_epoch
        assert self.after_steps is not None, "_require_one_time checked it"
        return self.after_steps


class OptimizerRule(Spec):
    """A separate optimizer, with its learning rate, for the parameters that a pattern covers."""

    pattern: Annotated[str, Field(min_length=1)]
    optimizer: Annotated[OptimizerSpec, ComponentOf("optimizer")]
    schedule: Annotated[ScheduleSpec, ComponentOf("schedule")] | None = None
    """A schedule of this optimizer's rate; null: the main schedule."""

    main_factor: ClassVar[None] = None
    """None, as in a `RateRule` with a schedule: the rate isn't a multiple of the main rate."""


class RateRule(Spec):
    """The learning rate of the parameters that a pattern covers: `factor` times a schedule's
    rate."""

    pattern: str
    factor: NonNegativeFloat = 1.0
    schedule: Annotated[ScheduleSpec, ComponentOf("schedule")] | None = None
    """A separate schedule, with the same `train.optimizer.lr`; null: the main schedule."""

    @model_validator(mode="after")
    def _require_one_setting(self) -> Self:
        if not self.model_fields_set & {"factor", "schedule"}:
            raise ValueError("set factor, schedule or both")
        return self

    @property
    def main_factor(self) -> float | None:
        """The factor of the main rate; None if the rule has a separate schedule."""
        return self.factor if self.schedule is None else None
