"""The types of a training step (configuration, state, gradients, record), and functions that select
parameters by path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

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
from pipeline.models.imported.with_lowerings import scope_root, with_lowerings
from pipeline.models.layers.model_spec import InitRule
from pipeline.models.layers.path_patterns import (
    EXCEPT,
    LayerPath,
    covers,
    is_frozen,
    require_covered,
)
from pipeline.models.lowerings.problem.lowering import LoweringPolicy
from pipeline.training.component_specs import AverageSpec, Backward, MetricSpec, Reduction
from pipeline.training.curvature import CurvatureRule, LayerSums
from pipeline.training.ledger import Readings, SampleLedger
from pipeline.training.loss_scales import LossScaling
from pipeline.training.non_finite_steps import STOP, NonFinitePolicy
from pipeline.training.parallel.shards import Shards
from pipeline.training.parallel.state_sharing import StateSharing
from pipeline.training.privacy.add_noise import PrivacyRule, PrivacyState
from pipeline.training.robustness.adversarial_rule import AdversarialRule
from pipeline.training.telemetry import StepOutcome

Array = jax.Array
Lowered = TypeVar("Lowered", bound=Callable[..., Any])
SampleLoss = Callable[..., Array]
"""(logits, labels, where) -> loss per sample; `where` is passed only with an `ignore_index`."""


@dataclass(frozen=True)
class FreezePhase:
    """A phase of a run. It begins after `start` steps and doesn't train the parameters that the
    patterns `frozen` cover."""

    start: int
    frozen: tuple[str, ...]


@dataclass(frozen=True)
class StepConfig:
    """Configuration of a step's functions; `image` describes one image after the map ops."""

    network: nn.Module
    image: ColumnSpec
    classes: int
    """Number of the network's outputs: of classes, of regression targets or of labels."""
    train_ops: Ops
    eval_ops: Ops
    loss: SampleLoss
    reduction: Reduction
    optimizer: optax.GradientTransformation
    loss_scale: LossScaling
    ignore_index: int | None = None
    """Label of entries that losses and metrics leave out. If it is set, the loss takes `where`."""
    hardest_share: float = 1.0
    """Share of a batch that the loss is reduced over: the samples with the largest losses."""
    curvature: CurvatureRule | None = None
    """Sums of each layer that the optimizer needs. If set, its `update` takes `curvature`."""
    buckets: tuple[Bucket, ...] = ()
    """Sizes that images are padded to, the smallest first; empty if all have one size."""
    padding_mask: bool = False
    """Whether images get one more channel, 1 inside of the image and 0 on padding."""
    init_rules: tuple[InitRule, ...] = ()
    frozen: tuple[str, ...] = ()
    """Patterns over parameters that aren't trained until the first of `phases`."""
    phases: tuple[FreezePhase, ...] = ()
    """Later phases, each with more trained parameters. The optimizer has a separate state for the
    new parameters of a phase (`freezing.optimize_by_phase`)."""
    fix_statistics: bool = False
    """Whether batch norm with frozen parameters uses its running statistics and doesn't update
    them. It applies to `phases`; before them, `network.fixed_statistics` applies."""
    layer_rates: tuple[tuple[str, float], ...] = ()
    """Factors on learning rates by outermost scope."""
    rate_groups: tuple[str, ...] = ()
    """Patterns over parameters with separate learning rates. The last pattern that covers a
    parameter applies."""
    accumulate: int = 1
    """Number of microbatches, one after the other, whose gradients are summed."""
    average: AverageSpec | None = None
    on_nan: NonFinitePolicy = STOP
    gradients: Callable[[Backward, Any, Array], tuple[Any, Any]] | None = None
    """(backward, parameters, key) -> gradients, auxiliary outputs; None: one backward pass."""
    metrics: tuple[MetricSpec, ...] = ()
    """Metrics of evaluations, besides the standard ones for classes."""
    task: Task = "classification"
    class_counts: tuple[int, ...] = ()
    """Training labels of each class, if the loss depends on them."""
    train_images: tuple[ColumnSpec, ...] = ()
    """Training images after the map ops, for each size that an op draws; empty if all have the size
    of `image`."""
    shards: Shards | None = None
    """Shards of a batch, also across devices; None if a batch isn't split."""
    sharing: StateSharing | None = None
    """Sharing of the state between devices; None if each has all of it."""
    privacy: PrivacyRule | None = None
    """Clipping and noise of a private run's gradients; None: the run isn't private."""
    adversarial: AdversarialRule | None = None
    """Attack on training images; None: they aren't attacked."""
    ledger_samples: int | None = None
    """Number of training samples of the ledger; None: the run has no ledger."""
    lowerings: LoweringPolicy | None = None
    """Policy by which the layers of a traced flax network get lowerings; None: the network's layers
    choose their lowerings themselves, or none is replaced."""

    def apply_lowerings(self, function: Lowered) -> Lowered:
        """Return `function`, which applies the network, with the lowerings of `lowerings`."""
        if self.lowerings is None:
            return function
        return with_lowerings(function, self.lowerings, scope_root(self.network))

    @property
    def never_trained(self) -> tuple[str, ...]:
        """Patterns over parameters that no phase trains."""
        return self.phases[-1].frozen if self.phases else self.frozen


@register_dataclass
@dataclass(frozen=True)
class OverflowCounts:
    """Counts for a loss scale that skips overflows, int32 scalars."""

    good_steps: Array
    """Steps since the last overflow, or since the scale was last changed."""
    bad_steps: Array
    """Consecutive overflows up to now."""
    skipped_steps: Array
    """Overflows since the run began."""


@register_dataclass
@dataclass(frozen=True)
class NonFiniteStepCounts:
    """Counts of non-finite steps, int32 scalars. Checkpoints have these names."""

    in_a_row: Array
    """Consecutive non-finite steps up to now."""
    left_out: Array
    """Steps of the run whose updates were skipped, or undone by a rollback."""


@register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that training changes, the content of a checkpoint.

    `step` (int32 scalar) is the number of steps so far, including steps without an update. Random
    numbers are a function of (seed, step), so there is no generator's state. `loss_scale` is a
    float32 scalar. Fields that a recipe doesn't need are None.
    """

    step: Array
    params: Any
    batch_stats: Any
    opt_state: Any
    loss_scale: Array
    overflows: OverflowCounts | None = None
    average: Any = None
    """The moving average of the trained parameters."""
    bad_steps: NonFiniteStepCounts | None = None
    privacy: PrivacyState | None = None
    ledger: SampleLedger | None = None


def get_privacy(state: TrainState) -> PrivacyState:
    """Return the secret and the clip of a private run's state."""
    assert state.privacy is not None, "the state of a private run has its secret"
    return state.privacy


class MappedBatch(NamedTuple):
    """A batch, or a microbatch, after the map ops."""

    images: Array
    """(B, H, W, C) float32."""
    labels: Array
    """(B, ...) int or (B, ..., C) float."""
    mask: Array
    """bool (B,): True for samples, False for padding."""
    dropout_key: Array
    """A JAX key."""
    draws: Array | None = None
    """Random numbers of the attack on the images, float32 (B, n), in adversarial training."""


class Gradients(NamedTuple):
    """Results of the backward pass over a batch."""

    values: Any
    """Gradients by trained parameter, float32; of the scaled loss until they are unscaled."""
    loss: Array
    """Loss of the batch without the loss scale, or a microbatch's share of it: a float32 scalar."""
    batch_stats: Any
    """Running statistics of batch norm after the pass."""
    layers: Mapping[str, LayerSums]
    """Sums of each layer, if the optimizer needs them, else empty."""
    within: Array | None = None
    """In a private run, the number of samples whose gradients' norm is at most the clip."""
    readings: Readings | None = None
    """Readings of the samples for the ledger; with shards, of the whole batch."""


class Record(NamedTuple):
    """Record of one step, float32 scalars.

    Its fields, in this order, are the columns of the telemetry, the keys of metrics.jsonl, and the
    tags of TensorBoard and trackers. `skipped` is 1 if the update was skipped, for an overflow or
    by `on_nan: skip`, else 0.
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


FLAGS = frozenset({"skipped"})
"""Columns that are 0 or 1. Monitors write them only for the steps that have 1."""


def record_step(
    state: TrainState,
    gradients: Gradients,
    learning_rate: Array,
    grad_norm: Array,
    outcome: StepOutcome,
) -> Record:
    """Return the record of a step. `state` is the state before the step, `gradients` are of the
    scaled loss, and `grad_norm` is the norm of the unscaled gradients."""
    return Record(
        loss=gradients.loss,
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        loss_scale=state.loss_scale,
        skipped=outcome.skipped.astype(jnp.float32),
    )


def split_params(params: Any, frozen: Sequence[str]) -> tuple[Any, Any]:
    """Return the trained parameters, and the parameters that the patterns `frozen` cover. With
    gradients of the trained parameters alone, the backward pass ends at the first trained layer.
    With `stop_gradient` it would go on to the first layer."""
    if not frozen:
        return params, {}
    flat = flatten_dict(dict(params))
    frozen_paths = {path for path in flat if is_frozen(frozen, path)}
    trained_params = {path: leaf for path, leaf in flat.items() if path not in frozen_paths}
    frozen_params = {path: flat[path] for path in frozen_paths}
    return unflatten_dict(trained_params), unflatten_dict(frozen_params)


def merge_params(trained: Any, frozen: Any) -> Any:
    """Join the two results of `split_params`."""
    if not frozen:
        return trained
    return unflatten_dict({**flatten_dict(dict(trained)), **flatten_dict(dict(frozen))})


def list_paths(params: Mapping[str, Any]) -> list[LayerPath]:
    return list(flatten_dict(dict(params)))


def require_trainable(params: Any, frozen: Sequence[str]) -> None:
    """Raise ValueError for a pattern that covers no parameter, and if all parameters are frozen."""
    paths = list_paths(params)
    require_covered([pattern.removeprefix(EXCEPT) for pattern in frozen], paths, "parameters")
    trained, _ = split_params(params, frozen)
    if not jax.tree.leaves(trained):
        raise ValueError(
            f"{', '.join(frozen)} freezes all {len(paths)} parameters; nothing is left to train"
        )


def reinitialize(params: Any, rules: Sequence[InitRule], key: Array) -> Any:
    """Return parameters in which each one that a rule covers is drawn again, by the last such rule.
    The key of a parameter is derived from `key` and the parameter's path. Raises ValueError if an
    initializer doesn't suit the shape, and for a rule that covers nothing."""
    if not rules:
        return params
    flat = flatten_dict(dict(params))
    patterns = [rule.pattern for rule in rules]
    require_covered(patterns, list(flat), "parameters", prefix="init.rules: ")
    for path, leaf in flat.items():
        covering = [rule for rule in rules if covers(rule.pattern, path)]
        if covering:
            param_key = jax.random.fold_in(key, crc32("/".join(path).encode()))
            flat[path] = covering[-1].init.build()(param_key, leaf.shape, jnp.float32)
    return unflatten_dict(flat)


def select_averaged(average: Any, params: Any) -> Any:
    """Return the parameters that have a moving average; None without an average."""
    if average is None:
        return None
    flat = flatten_dict(dict(params))
    return unflatten_dict({path: flat[path] for path in list_paths(average)})
