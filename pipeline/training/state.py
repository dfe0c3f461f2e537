"""The types of a training step: its configuration, the state that it changes, its gradients, its
outcome and its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.tree_util import register_dataclass

from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import Ops
from pipeline.data.padding.buckets import Bucket
from pipeline.data.targets import Task
from pipeline.models.layers.model_spec import InitRule
from pipeline.models.layers.path_patterns import is_frozen
from pipeline.training.bad_steps import STOP, BadStepPolicy
from pipeline.training.curvature import CurvatureRule, LayerSums
from pipeline.training.loss_scales import LossScaling
from pipeline.training.parallel.shards import Shards
from pipeline.training.part_specs import AverageSpec, Backward, MetricSpec, Reduction

Array = jax.Array
SampleLoss = Callable[..., Array]
"""(logits, labels, where) -> loss per sample; `where` is given only with an `ignore_index`."""


@dataclass(frozen=True)
class FreezePhase:
    """The steps of a run after the first `start`, and the patterns of what they don't train."""

    start: int
    frozen: tuple[str, ...]


@dataclass(frozen=True)
class StepConfig:
    """Configuration of a step's functions; `image` describes one image after the map ops."""

    network: nn.Module
    image: ColumnSpec
    classes: int
    """Outputs of the network: classes, numbers or labels."""
    train_ops: Ops
    eval_ops: Ops
    loss: SampleLoss
    reduction: Reduction
    optimizer: optax.GradientTransformation
    loss_scale: LossScaling
    ignore_index: int | None = None
    """The label of entries without a class, which neither losses nor metrics count; the loss takes
    `where` then."""
    hardest_share: float = 1.0
    """Share of the samples of a batch that is reduced, those with the largest losses (M-13)."""
    curvature: CurvatureRule | None = None
    """Sums of each layer that the optimizer needs: its `update` then takes `curvature`."""
    buckets: tuple[Bucket, ...] = ()
    """Sizes that images are padded to (D-18), the smallest first; empty where all have one size."""
    padding_mask: bool = False
    """Whether images get one more channel, 1 inside of the image and 0 on padding."""
    init_rules: tuple[InitRule, ...] = ()
    frozen: tuple[str, ...] = ()
    """Patterns over parameters that are not trained, or not before the first of `phases`."""
    phases: tuple[FreezePhase, ...] = ()
    """Later phases, in each of which more parameters are trained; the optimizer keeps a state of
    its own for those of each (`freezing.by_phase`)."""
    fix_statistics: bool = False
    """Whether batch norm whose parameters are frozen normalises by its running statistics, which
    then stay: in the first phase the network itself says so."""
    layer_rates: tuple[tuple[str, float], ...] = ()
    """Factors on learning rates by outermost scope."""
    rate_groups: tuple[str, ...] = ()
    """Patterns over parameters with learning rates of their own; of those that cover a parameter
    the last decides."""
    accumulate: int = 1
    """Number of microbatches, one after the other, whose gradients are summed."""
    average: AverageSpec | None = None
    on_nan: BadStepPolicy = STOP
    gradients: Callable[[Backward, Any, Array], tuple[Any, Any]] | None = None
    """How the gradients are got from backward passes; None: from one."""
    metrics: tuple[MetricSpec, ...] = ()
    """Metrics of evaluations beside those of classes."""
    task: Task = "classification"
    class_counts: tuple[int, ...] = ()
    """Training labels of each class, where the loss depends on them."""
    train_images: tuple[ColumnSpec, ...] = ()
    """Training images after the map ops, where an op draws their size for each step (D-18); empty
    where all are like `image`."""
    shards: Shards | None = None
    """Shards of a batch, on several devices; None where one device takes a batch as a whole."""

    @property
    def never_trained(self) -> tuple[str, ...]:
        """Patterns over parameters that no phase trains."""
        return self.phases[-1].frozen if self.phases else self.frozen


@register_dataclass
@dataclass(frozen=True)
class OverflowCounts:
    """Counts of a loss scale that skips overflows, int32 scalars."""

    good_steps: Array
    """Steps since the last overflow, or since the scale was last changed."""
    bad_steps: Array
    """Consecutive overflows up to now."""
    skipped_steps: Array
    """Overflows since the run began."""


@register_dataclass
@dataclass(frozen=True)
class BadStepCounts:
    """Counts of a policy that continues after bad steps, int32 scalars.

    Checkpoints hold them by these names.
    """

    in_a_row: Array
    """Consecutive bad steps up to now."""
    left_out: Array
    """Steps since the run began whose updates were skipped, or undone by a rollback."""


@register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that training changes; the content of a checkpoint.

    `step` (int32 scalar) counts steps, including those without an update. Random draws are keyed
    by (seed, step), so the state of the random generator is the seed and this counter. `loss_scale`
    is a float32 scalar. Fields of features that a recipe does not use are None.
    """

    step: Array
    params: Any
    batch_stats: Any
    opt_state: Any
    loss_scale: Array
    overflows: OverflowCounts | None = None
    average: Any = None
    """The moving average of the trained parameters."""
    bad_steps: BadStepCounts | None = None


class Gradients(NamedTuple):
    """Results of the backward pass over a batch."""

    values: Any
    """By trained parameter, float32: of the loss times its scale, until that is divided out."""
    loss: Array
    """float32 ()."""
    batch_stats: Any
    layers: Mapping[str, LayerSums]
    """Sums of each layer, where the optimizer needs them, else empty."""


class StepOutcome(NamedTuple):
    """Outcome of steps as bool masks, () or (steps,), of numpy or jax.

    At most one holds for a step; where none does, the step is bad and ends the run.
    """

    applied: Any
    """Loss and gradient are finite, so the update was applied."""
    overflow: Any
    """The update was skipped by the loss scale: the loss is finite, the gradient is not."""
    skipped_bad: Any
    """The step is bad, no overflow, and its update was skipped by `on_nan: skip`."""

    @property
    def skipped(self) -> Any:
        """Whether there was no update, and training continues."""
        return self.overflow | self.skipped_bad

    @property
    def should_continue(self) -> Any:
        """Whether training continues after the step."""
        return self.applied | self.skipped

    @staticmethod
    def from_columns(
        xp: Any, loss: Any, grad_norm: Any, skipped: Any, *, skips_overflow: bool = True
    ) -> StepOutcome:
        """Read the outcome back from columns of `Record`; `xp` is numpy or jax.numpy.

        `skips_overflow` says whether the loss scale skips overflows.
        """
        applied = xp.isfinite(loss) & xp.isfinite(grad_norm)
        was_skipped = xp.asarray(skipped) > 0
        overflow = was_skipped & (xp.isfinite(loss) if skips_overflow else False)
        return StepOutcome(applied, overflow, was_skipped & ~overflow)


class Record(NamedTuple):
    """Record of one step, float32 scalars; the columns of the telemetry buffer.

    `skipped` is 1 where the update was skipped, for an overflow or by `on_nan: skip`, else 0.
    """

    loss: Array
    learning_rate: Array
    grad_norm: Array
    loss_scale: Array
    skipped: Array | float = 0.0

    @property
    def should_continue(self) -> Array:
        """Whether training continues after this step, bool ()."""
        outcome = StepOutcome.from_columns(jnp, self.loss, self.grad_norm, self.skipped)
        return outcome.should_continue


def split(params: Any, frozen: Sequence[str]) -> tuple[Any, Any]:
    """Split parameters into the trained ones and those that a pattern freezes (M-06).

    A gradient by the trained ones has no backward pass below the first of them, where
    `stop_gradient` would cut it; it still passes through a frozen layer above a trained one.
    """
    if not frozen:
        return params, {}
    flat = flatten_dict(dict(params))
    stays = {path for path in flat if is_frozen(frozen, path)}
    return (
        unflatten_dict({path: leaf for path, leaf in flat.items() if path not in stays}),
        unflatten_dict({path: flat[path] for path in stays}),
    )


def merge(trained: Any, frozen: Any) -> Any:
    """Join the two results of `split`."""
    if not frozen:
        return trained
    return unflatten_dict({**flatten_dict(dict(trained)), **flatten_dict(dict(frozen))})
