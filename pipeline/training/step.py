"""One training step and its evaluation, as pure functions.

`_step` maps the batch, computes the loss (forward_pass.py) and its gradients, decides the outcome
and updates the state (update.py). The types are in state.py. The backend compiles the functions
into programs, which the training loop (engine/loop.py) calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import mul
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pipeline.data.batch import Batch
from pipeline.data.dataset_spec import Ops
from pipeline.data.padding.buckets import NO_PADDING, SIZE
from pipeline.data.transform import apply_ops, choose_variant, count_choices, select_variants
from pipeline.models.modules.name_stack import DATA, UPDATE
from pipeline.training.bucketing import apply_in_bucket
from pipeline.training.forward_pass import ForwardPass
from pipeline.training.losses import (
    compute_losses,
    count_valid_labels,
    divides_by_labels,
    make_label_mask,
)
from pipeline.training.metrics import EvalSums, add_batch, add_metric_sums, add_sums, zero_sums
from pipeline.training.parallel.fixed_sum import (
    gather_rows,
    place_in_batch,
    sum_devices,
    sum_local_shards,
    sum_shards,
)
from pipeline.training.parallel.parallel_spec import Shards
from pipeline.training.state import COLUMNS, Gradients, Inputs, MappedBatch, Record, TrainState
from pipeline.training.step_config import StepConfig
from pipeline.training.step_feature import ComputeGradients
from pipeline.training.telemetry import StepOutcome, count_updates
from pipeline.training.update import (
    apply_if_finite,
    apply_update,
    decide_outcome,
    init_state,
    init_with_output,
    make_key,
)

T = TypeVar("T")


@dataclass(frozen=True)
class TrainStep:
    """The pure functions that a backend compiles.

    `init(seed)` makes the state at step 0; the seed is uint32 (2,). `step(state, batch,
    learning_rates)` does one step. The rates are float32 (updates,), or (updates, 1 + groups) with
    rate groups. A step whose loss or gradient isn't finite leaves the parameters and the
    optimizer's state as they are. `evaluate(state, batch, sums)` adds a batch to the sums.

    If several runs share a compiled step (study/population), `step` and `evaluate` have additional
    arguments at the end: the constants that differ between the runs.
    """

    init: Callable[[Array], TrainState]
    step: Callable[[TrainState, Batch, Array], tuple[TrainState, Record]]
    evaluate: Callable[[TrainState, Batch, EvalSums], EvalSums]
    zero_sums: Callable[[], EvalSums]
    columns: tuple[str, ...] = COLUMNS
    """Names of the columns of a step's record."""


def make_train_step(config: StepConfig) -> TrainStep:
    """Make the functions of a step from its configuration."""

    def init(seed: Array) -> TrainState:
        _, variables = init_with_output(config, seed)
        return init_state(config, variables)

    def evaluate(state: TrainState, batch: Batch, sums: EvalSums) -> EvalSums:
        def add(sums: EvalSums, batch: Batch) -> EvalSums:
            return apply_in_bucket(
                config.padding,
                batch,
                lambda cropped: _evaluate(config, state, cropped, sums),
                is_random=False,
            )

        if config.shards is None:
            return add(sums, batch)
        added = sum_shards(
            config.shards, batch, lambda shard, _: add(make_zero_sums(config), shard)
        )
        return add_sums(sums, added)

    columns = (*COLUMNS, *config.columns)
    step = partial(_step, config)
    return TrainStep(init, step, evaluate, lambda: make_zero_sums(config), columns)


def _step(
    config: StepConfig, state: TrainState, batch: Batch, learning_rates: Array
) -> tuple[TrainState, Record]:
    """Return the state after a step, and the step's record."""
    readers = config.list_acting("add_readings")
    # XLA would copy the ledger if it were an operand of the branches of phases and buckets.
    before = replace(state, features=_leave_out(state.features, readers))

    def compute(step_config: StepConfig) -> tuple[TrainState, Record, Mapping[str, Any]]:
        padding = NO_PADDING if step_config.shards is not None else step_config.padding
        return apply_in_bucket(
            padding,
            batch,
            lambda cropped: _update_by_batch(step_config, before, cropped, learning_rates),
        )

    for feature in config.list_acting("choose_config"):
        compute = partial(feature.choose_config, step=state.step, compute=compute)
    after, record, readings = compute(config)
    if not readers:
        return after, record
    outcome = StepOutcome.from_columns(jnp, record.loss, record.grad_norm, record.skipped)
    num_samples = batch.num_samples
    rows = batch.sample if num_samples is None else batch.sample % num_samples
    rows = gather_rows(config.shards, rows)
    for reader in readers:
        part = reader.add_readings(
            state.features[reader.name],
            rows,
            readings[reader.name],
            outcome,
            repeats=num_samples is not None,
        )
        after = after.replace_part(reader.name, part)
    return after, record


def _leave_out(parts: Mapping[str, Any], features: list[Any]) -> dict[str, Any]:
    """Return the states of features, without these `features`."""
    names = {feature.name for feature in features}
    return {name: part for name, part in parts.items() if name not in names}


def _update_by_batch(
    config: StepConfig, state: TrainState, batch: Batch, learning_rates: Array
) -> tuple[TrainState, Record, Mapping[str, Any]]:
    """Return the state after a step, the step's record, and the readings of its samples."""
    whole_state = state
    if config.sharing is not None:
        whole_state = config.sharing.gather_weights(state, config.list_read())
    gradients = compute_step_gradients(config, whole_state, batch)
    for feature in config.features:
        gradients = gradients._replace(values=feature.change_gradients(whole_state, gradients))
    after, record = _update_state(config, state, gradients, batch.count, learning_rates)
    return after, record, gradients.readings


@jax.named_scope(UPDATE)
def _update_state(
    config: StepConfig,
    state: TrainState,
    gradients: Gradients,
    count: Array,
    learning_rates: Array,
) -> tuple[TrainState, Record]:
    """Return the state after a step on a batch of `count` samples, and the step's record."""
    # Gradients are multiplied by the inverse: XLA fuses a product with each use of a gradient, but
    # would store quotients, in one more pass over all parameters. For the same reason
    # `compute_norm` multiplies the norm, not the gradients.
    loss_scale = get_loss_scale(config, state)
    unscale = 1 / loss_scale
    # A scalar, or with rate groups (1 + groups,): the rate without a group, then each group's rate.
    rates = learning_rates[jnp.minimum(count_updates(state), learning_rates.shape[0] - 1)]
    rate = rates[0] if rates.ndim else rates
    norm = compute_norm(gradients.values, unscale)
    outcome = decide_outcome(config, state, gradients.loss, norm)
    record = Record(
        loss=gradients.loss,
        learning_rate=rate,
        grad_norm=norm,
        loss_scale=jnp.asarray(loss_scale, jnp.float32),
        skipped=outcome.skipped.astype(jnp.float32),
        extras=_make_columns(config, state, gradients, outcome),
    )

    def update_whole(state: TrainState, scaled: Any) -> TrainState:
        values = jax.tree.map(lambda g: g * unscale, scaled)
        unscaled = gradients._replace(values=values)
        return apply_update(config, state, unscaled, count, unscale, rates)

    update: Callable[[TrainState, Any], TrainState] = update_whole
    if config.sharing is not None:
        whole = config.sharing.state
        # `state` has no part of a feature that reads samples (`_step`), so the shared shapes must
        # have none either.
        parts = _leave_out(whole.features, config.list_acting("add_readings"))
        sharing = replace(config.sharing, state=replace(whole, features=parts))
        update = partial(sharing.update, update_whole)
    after = apply_if_finite(outcome.applied, lambda s: update(s, gradients.values), state)
    for feature in config.features:
        after = feature.change_step(after, outcome)
    return after, record


def _make_columns(
    config: StepConfig, state: TrainState, gradients: Gradients, outcome: StepOutcome
) -> tuple[Array, ...]:
    """Return the columns of the features. Raises ValueError if one returns another number of
    columns than it names."""
    columns: tuple[Array, ...] = ()
    for feature in config.features:
        made = feature.make_columns(state, gradients, outcome)
        if len(made) != len(feature.columns):
            names = ", ".join(feature.columns) or "none"
            raise ValueError(f"{feature.name}: returns {len(made)} columns; must be: {names}")
        columns += tuple(made)
    return columns


def get_loss_scale(config: StepConfig, state: TrainState) -> Array | float:
    """Return the factor on the loss that the update divides by, float32 () or 1."""
    scales = [item.get_loss_scale(state) for item in config.list_acting("get_loss_scale")]
    return reduce(mul, scales) if scales else 1.0


def compute_step_gradients(config: StepConfig, state: TrainState, batch: Batch) -> Gradients:
    """Return the gradients of the scaled loss of a batch. Without shards, the batch must be cropped
    to its bucket."""
    dropout_key = make_dropout_key(batch, state.step)
    if config.shards is not None:
        return _sum_shard_gradients(config, config.shards, state, batch, dropout_key)

    def compute(ops: Ops) -> Gradients:
        mapped = map_training_batch(config, ops, batch, dropout_key)
        divisor = batch.count
        if _needs_counting(config):
            divisor = jnp.maximum(_count_for_mean(config, mapped.labels, mapped.mask), 1.0)
        return compute_gradients(config, state, mapped, divisor, get_loss_scale(config, state))

    return _call_with_step_ops(config, batch, state.step, compute)


def compute_gradients(
    config: StepConfig,
    state: TrainState,
    batch: MappedBatch,
    divisor: Array | int,
    scale: Array | float,
) -> Gradients:
    """Return the gradients of `scale` times the loss of the valid samples of a mapped batch. A mean
    divides by `divisor`."""
    differentiating = config.list_acting("differentiate")

    def compute_part(collections: Mapping[str, Any], batch: MappedBatch) -> Gradients:
        forward = ForwardPass(config, state, collections, batch, divisor, scale)
        forward = forward.with_changed_inputs()
        if differentiating:
            values, results = differentiating[0].differentiate(forward, forward.trained)
        else:
            values, results = forward.differentiate(forward.trained)
        parts = {
            feature.name: feature.sum_part(forward, values)
            for feature in config.list_acting("sum_part")
        }
        gradients = Gradients(values, *results)
        return gradients._replace(sums={**gradients.sums, **parts})

    compute: ComputeGradients = compute_part
    for feature in config.features:
        compute = feature.split_batch(compute)
    return compute(state.collections, batch)


def make_dropout_key(batch: Batch, step: Array | int) -> Array:
    """Return the dropout key of a step; `step` is the number of steps before it."""
    return jax.random.fold_in(make_key(batch.seed, 1), step)


def _call_with_step_ops(
    config: StepConfig, batch: Batch, step: Array, compute: Callable[[Ops], T]
) -> T:
    """Return `compute(ops)` for the map ops of a training step. If an op has variants, `compute` is
    traced once for each. The program has a branch for each variant, so the host needn't choose
    between the steps of a program. Outside of jit Python selects it."""
    num_choices = count_choices(config.train_ops)
    if num_choices == 1:
        return compute(config.train_ops)
    choice = choose_variant(jnp, config.train_ops, batch.seed, batch.epoch, step)
    branches = [partial(compute, select_variants(config.train_ops, n)) for n in range(num_choices)]
    if not isinstance(choice, jax.core.Tracer):
        return branches[int(choice)]()
    return jax.lax.switch(choice, branches)


def _sum_shard_gradients(
    config: StepConfig, shards: Shards, state: TrainState, batch: Batch, dropout_key: Array
) -> Gradients:
    """Return the gradients of a batch, summed over its shards. Batch norm normalizes each shard by
    itself; the running statistics are the mean over shards. The dropout key of a shard is derived
    from its number."""

    def apply_to_shard(
        compute: Callable[[Batch, Ops, Array], T], shard: Batch, shard_number: Array
    ) -> T:
        """Return `compute(shard cropped to its bucket, map ops of the step, shard number)`."""

        def compute_cropped(cropped: Batch) -> T:
            return _call_with_step_ops(
                config, cropped, state.step, lambda ops: compute(cropped, ops, shard_number)
            )

        return apply_in_bucket(config.padding, shard, compute_cropped)

    def count_labels(cropped: Batch, ops: Ops, shard_number: Array) -> Array:
        _, labels = map_batch(config, ops, cropped)
        mask = keep_samples(config, cropped, jnp.arange(labels.shape[0]) < cropped.count)
        return _count_for_mean(config, labels, mask)

    divisor = batch.count
    if _needs_counting(config):
        divisor = jnp.maximum(sum_shards(shards, batch, partial(apply_to_shard, count_labels)), 1.0)

    scale = get_loss_scale(config, state)

    def compute(cropped: Batch, ops: Ops, shard_number: Array) -> Gradients:
        key = jax.random.fold_in(dropout_key, shard_number)
        mapped = map_training_batch(config, ops, cropped, key)
        gradients = compute_gradients(config, state, mapped, divisor, scale)
        # Each shard fills its rows of the whole batch, and the sum over shards has all rows.
        readings = jax.tree.map(
            lambda rows: place_in_batch(rows, shard_number, shards.count), gradients.readings
        )
        return gradients._replace(readings=readings)

    local = sum_local_shards(shards, batch, partial(apply_to_shard, compute))
    exchanging = config.list_acting("exchange_sums")
    total = sum_devices(shards, local._replace(sums=_leave_out(local.sums, exchanging)))
    sums = {
        feature.name: feature.exchange_sums(
            state, local.sums[feature.name], partial(sum_devices, shards)
        )
        for feature in exchanging
    }
    collections = jax.tree.map(lambda x: x / shards.count, total.collections)
    values = total.values
    if shards.factor != 1:
        values = jax.tree.map(lambda g: g * shards.factor, values)
    return total._replace(values=values, collections=collections, sums={**total.sums, **sums})


@jax.named_scope(DATA)
def map_batch(config: StepConfig, ops: Ops, batch: Batch) -> tuple[Inputs, Array]:
    """Return the network's inputs and the labels of a batch after the map ops."""
    columns = apply_ops(jnp, ops, batch.columns, batch.seed, batch.epoch, batch.sample)
    sizes = batch.columns[SIZE] if config.padding.has_mask else None
    return config.inputs.read(jnp, columns, sizes), columns["label"]


def map_training_batch(
    config: StepConfig, ops: Ops, batch: Batch, dropout_key: Array
) -> MappedBatch:
    """Return a batch after the map ops, with the random numbers of its features."""
    inputs, labels = map_batch(config, ops, batch)
    mapped = mask_batch(inputs, labels, batch.count, dropout_key)
    mapped = mapped._replace(mask=keep_samples(config, batch, mapped.mask))
    drawing = config.list_acting("draw")
    return mapped._replace(
        extras={feature.name: feature.draw(batch, inputs) for feature in drawing}
    )


def keep_samples(config: StepConfig, batch: Batch, mask: Array) -> Array:
    """Return the samples of a mask, bool (B,), that features keep."""
    for feature in config.list_acting("keep_samples"):
        mask = mask & feature.keep_samples(batch)
    return mask


def _needs_counting(config: StepConfig) -> bool:
    """Return whether a mean divides by another number than the batch's number of samples."""
    return divides_by_labels(config) or bool(config.list_acting("keep_samples"))


def _count_for_mean(config: StepConfig, labels: Array, mask: Array) -> Array:
    """Return the number of valid labels, or of samples, in the mask that a mean divides by."""
    if divides_by_labels(config):
        return count_valid_labels(config, labels, mask)
    return mask.sum(dtype=jnp.float32)


def mask_batch(
    inputs: Inputs, labels: Array, count: Array | int, dropout_key: Array
) -> MappedBatch:
    """Return a mapped batch whose first `count` samples are valid. Takes the network's inputs,
    labels (B, ...) int or (B, ..., C) float, and a dropout key."""
    return MappedBatch(inputs, labels, jnp.arange(labels.shape[0]) < count, dropout_key)


def compute_norm(gradients: Any, unscale: Array | float) -> Array:
    """Return the norm of the unscaled gradients, float32 (), from gradients of the scaled loss."""
    return optax.tree.norm(gradients) * unscale


def make_zero_sums(config: StepConfig) -> EvalSums:
    has_classes = config.targets.task == "classification"
    return zero_sums(len(config.targets), config.metrics, has_classes=has_classes)


def get_evaluated_weights(config: StepConfig, state: TrainState) -> dict[str, Any]:
    """Return the variables for an evaluation, such as with a moving average of the trained
    parameters in place of these."""
    params = state.params
    for feature in config.features:
        params = feature.change_weights(state, params)
    return {**state.variables, "params": params}


def predict(config: StepConfig, variables: Any, batch: Batch) -> tuple[Array, Array]:
    """Return the logits of a batch in evaluation mode, and its labels."""
    inputs, labels = map_batch(config, config.eval_ops, batch)
    apply = config.apply_lowerings(partial(config.network.apply, train=False))
    logits: Any = apply(variables, inputs)
    return logits, labels


def _evaluate(config: StepConfig, state: TrainState, batch: Batch, sums: EvalSums) -> EvalSums:
    """Return the sums of an evaluation with a batch added. The batch must be cropped to its
    bucket."""
    logits, labels = predict(config, get_evaluated_weights(config, state), batch)
    mask = jnp.arange(labels.shape[0]) < batch.count
    losses = compute_losses(config, logits, labels)
    where = make_label_mask(config, labels)
    total = add_batch(sums, logits, labels, losses, mask, where)
    return add_metric_sums(total, config.metrics, logits, labels, mask, where)
