"""One training step, its initial state and its evaluation, as pure functions.

`_step` maps the batch, computes the loss (losses.py) and its gradients, decides the outcome and
updates the state (update.py). The types are in state.py. The training loop (engine/loop.py) calls
the functions, and the backend runs them on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pipeline.data.batch import Batch
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import Ops
from pipeline.data.padding.buckets import SIZE
from pipeline.data.transform import apply_ops, count_choices, draw_choice, select_variants
from pipeline.models.modules.name_stack import DATA, UPDATE
from pipeline.training.bucketing import add_padding_mask, apply_in_bucket
from pipeline.training.curvature import LayerSums, exchange_moments
from pipeline.training.freezing import apply_phase, select_phase
from pipeline.training.ledger import Readings, add_readings, make_ledger
from pipeline.training.losses import (
    compute_divisor,
    compute_losses,
    count_valid_labels,
    divides_by_labels,
    make_label_mask,
)
from pipeline.training.metrics import EvalSums, add_batch, add_metric_sums, add_sums, zero_sums
from pipeline.training.microbatch_gradients import compute_gradients
from pipeline.training.parallel.fixed_sum import (
    gather_rows,
    place_in_batch,
    sum_devices,
    sum_local_shards,
    sum_shards,
)
from pipeline.training.parallel.shards import Shards
from pipeline.training.privacy.add_noise import add_noise
from pipeline.training.state import (
    Gradients,
    MappedBatch,
    NonFiniteStepCounts,
    OverflowCounts,
    Record,
    StepConfig,
    TrainState,
    get_privacy,
    merge_params,
    record_step,
    reinitialize,
    split_params,
)
from pipeline.training.telemetry import StepOutcome, count_updates
from pipeline.training.update import (
    apply_if_finite,
    apply_update,
    count_non_finite_step,
    count_overflow,
    decide_outcome,
)

T = TypeVar("T")


@dataclass(frozen=True)
class TrainStep:
    """The pure functions that a backend compiles.

    `init(seed)` makes the state at step 0; the seed is uint32 (2,). `step(state, batch,
    learning_rates)` does one update. The rates are float32 (total steps,), or (total steps, 1 +
    groups) with rate groups. A step whose loss or gradient isn't finite leaves the parameters and
    the optimizer's state as they are. `evaluate(state, batch, sums)` adds a batch to the sums.

    If several runs share a compiled step (study/population), `step` and `evaluate` have additional
    arguments at the end: the constants that differ between the runs.
    """

    init: Callable[[Array], TrainState]
    step: Callable[[TrainState, Batch, Array], tuple[TrainState, Record]]
    evaluate: Callable[[TrainState, Batch, EvalSums], EvalSums]
    zero_sums: Callable[[], EvalSums]


def make_train_step(config: StepConfig) -> TrainStep:
    """Make the functions of a step from its configuration."""

    def init(seed: Array) -> TrainState:
        _, variables = init_with_output(config, seed)
        return init_state(config, variables)

    def step(state: TrainState, batch: Batch, learning_rates: Array) -> tuple[TrainState, Record]:
        # XLA would copy the ledger if it were an operand of the branches of phases and buckets.
        before = replace(state, ledger=None)

        def compute(phase_config: StepConfig) -> tuple[TrainState, Record, Readings | None]:
            if phase_config.shards is not None or not phase_config.buckets:
                return _step(phase_config, before, batch, learning_rates)
            return apply_in_bucket(
                phase_config.buckets,
                batch,
                lambda cropped: _step(phase_config, before, cropped, learning_rates),
            )

        after, record, readings = (
            apply_phase(config, state.step, compute) if config.phases else compute(config)
        )
        if state.ledger is None or readings is None:
            return after, record
        outcome = StepOutcome.from_columns(jnp, record.loss, record.grad_norm, record.skipped)
        num_samples = batch.num_samples
        rows = batch.sample if num_samples is None else batch.sample % num_samples
        rows = gather_rows(config.shards, rows)
        repeats = num_samples is not None
        ledger = add_readings(state.ledger, rows, readings, outcome.applied, repeats=repeats)
        return replace(after, ledger=ledger), record

    def evaluate(state: TrainState, batch: Batch, sums: EvalSums) -> EvalSums:
        def add(sums: EvalSums, batch: Batch) -> EvalSums:
            return apply_in_bucket(
                config.buckets,
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

    return TrainStep(init, step, evaluate, lambda: make_zero_sums(config))


def _step(
    config: StepConfig, state: TrainState, batch: Batch, learning_rates: Array
) -> tuple[TrainState, Record, Readings | None]:
    """Return the state after a step, the step's record, and the readings of its samples; None
    without a ledger."""
    whole_state = state
    if config.sharing is not None:
        whole_state = config.sharing.gather_fields(state, "params")
    gradients = compute_step_gradients(config, whole_state, batch)
    if config.privacy is not None:
        values = add_noise(config.privacy, get_privacy(state), state.step, gradients.values)
        gradients = gradients._replace(values=values)
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
    """Return the state after a step with gradients over `count` samples, and the step's record."""
    # Gradients are multiplied by the inverse: XLA fuses a product with each use of a gradient, but
    # would store quotients, in one more pass over all parameters. For the same reason
    # `compute_norm` multiplies the norm, not the gradients.
    unscale = 1 / state.loss_scale
    # A scalar, or with rate groups (1 + groups,): the rate without a group, then each group's rate.
    rates = learning_rates[jnp.minimum(count_updates(state), learning_rates.shape[0] - 1)]
    rate = rates[0] if config.rate_groups else rates
    norm = compute_norm(gradients.values, unscale)
    outcome = decide_outcome(config.on_nan, state, gradients.loss, norm)
    record = record_step(state, gradients, rate, norm, outcome)

    def update_whole(state: TrainState, scaled: Any) -> TrainState:
        values = jax.tree.map(lambda g: g * unscale, scaled)
        unscaled = gradients._replace(values=values)
        return apply_update(config, state, unscaled, count, unscale, rates)

    update: Callable[[TrainState, Any], TrainState] = update_whole
    if config.sharing is not None:
        # `state` has no ledger here (`make_train_step`), so the shared shapes must have none
        # either.
        whole_shapes = replace(config.sharing.state, ledger=None)
        sharing = replace(config.sharing, state=whole_shapes)
        update = partial(sharing.update, update_whole)
    after = apply_if_finite(outcome.applied, lambda s: update(s, gradients.values), state)
    after = count_overflow(config.loss_scale, after, outcome)
    return count_non_finite_step(config.on_nan, after, outcome), record


def compute_step_gradients(config: StepConfig, state: TrainState, batch: Batch) -> Gradients:
    """Return the gradients of the scaled loss of a batch. Without shards, the batch must be cropped
    to its bucket."""
    dropout_key = make_dropout_key(batch, state.step)
    if config.shards is not None:
        return _sum_shard_gradients(config, config.shards, state, batch, dropout_key)

    def compute(ops: Ops) -> Gradients:
        mapped = map_training_batch(config, ops, batch, dropout_key)
        divisor = compute_divisor(config, mapped.labels, mapped.mask, batch.count)
        return compute_gradients(config, state, mapped, divisor, state.loss_scale)

    return _call_with_step_ops(config, batch, state.step, compute)


def make_dropout_key(batch: Batch, step: Array | int) -> Array:
    """Return the dropout key of a step; `step` is the number of steps before it."""
    return jax.random.fold_in(_make_key(batch.seed, 1), step)


def _call_with_step_ops(
    config: StepConfig, batch: Batch, step: Array, compute: Callable[[Ops], T]
) -> T:
    """Return `compute(ops)` for the map ops of a training step. If an op is drawn for each step,
    `compute` is traced once for each choice. The program has a branch for each choice, so the host
    needn't draw between the steps of a program. Outside of jit Python selects it."""
    num_choices = count_choices(config.train_ops)
    if num_choices == 1:
        return compute(config.train_ops)
    choice = draw_choice(jnp, num_choices, batch.seed, step)
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

        return apply_in_bucket(config.buckets, shard, compute_cropped)

    def count_labels(cropped: Batch, ops: Ops, shard_number: Array) -> Array:
        _, labels = map_batch(config, ops, cropped)
        return count_valid_labels(config, labels, jnp.arange(labels.shape[0]) < cropped.count)

    divisor = batch.count
    if divides_by_labels(config):
        divisor = jnp.maximum(sum_shards(shards, batch, partial(apply_to_shard, count_labels)), 1.0)

    def compute(cropped: Batch, ops: Ops, shard_number: Array) -> Gradients:
        key = jax.random.fold_in(dropout_key, shard_number)
        mapped = map_training_batch(config, ops, cropped, key)
        gradients = compute_gradients(config, state, mapped, divisor, state.loss_scale)
        # Each shard fills its rows of the whole batch, and the sum over shards has all rows.
        readings = jax.tree.map(
            lambda rows: place_in_batch(rows, shard_number, shards.count), gradients.readings
        )
        return gradients._replace(readings=readings)

    local = sum_local_shards(shards, batch, partial(apply_to_shard, compute))
    # Gradients and numbers of positions are added over devices at every update. The moments of
    # layers are large, so `exchange_moments` adds them only at updates that refresh the curvature.
    num_positions = {path: layer.num_positions for path, layer in local.layers.items()}
    total, num_positions = sum_devices(shards, (local._replace(layers={}), num_positions))
    layers: Mapping[str, LayerSums] = {}
    if config.curvature is not None:
        due = config.curvature.is_due(count_updates(state))
        add = partial(sum_devices, shards)
        layers = exchange_moments(config.curvature, local.layers, num_positions, due, add)
    batch_stats = jax.tree.map(lambda x: x / shards.count, total.batch_stats)
    values = total.values
    if shards.factor != 1:
        values = jax.tree.map(lambda g: g * shards.factor, values)
    return total._replace(values=values, batch_stats=batch_stats, layers=layers)


@jax.named_scope(DATA)
def map_batch(config: StepConfig, ops: Ops, batch: Batch) -> tuple[Array, Array]:
    """Return the images, NHWC float32, and the labels of a batch after the map ops."""
    columns = apply_ops(jnp, ops, batch.columns, batch.seed, batch.epoch, batch.sample)
    sizes = batch.columns[SIZE] if config.padding_mask else None
    return make_network_inputs(columns["image"], config.image.layout, sizes), columns["label"]


def make_network_inputs(images: Array, layout: str, sizes: Array | None) -> Array:
    """Convert images to a network's input, NHWC float32. `layout` is hwc or chw. `sizes` (B, 1 or
    2) are the sizes of the images without padding. With sizes, the input has an additional channel,
    1 on the image and 0 on padding."""
    images = images.astype(jnp.float32)
    if layout != "hwc":
        images = images.transpose(0, 2, 3, 1)
    return images if sizes is None else add_padding_mask(images, sizes)


def map_training_batch(
    config: StepConfig, ops: Ops, batch: Batch, dropout_key: Array
) -> MappedBatch:
    """Return a batch after the map ops; in adversarial training, with the attack's random
    numbers."""
    images, labels = map_batch(config, ops, batch)
    mapped = mask_batch(images, labels, batch.count, dropout_key)
    if config.adversarial is None:
        return mapped
    return mapped._replace(draws=config.adversarial.draw(batch, images.shape))


def mask_batch(images: Array, labels: Array, count: Array | int, dropout_key: Array) -> MappedBatch:
    """Return a mapped batch whose first `count` samples are valid. Takes images (B, H, W, C)
    float32, labels (B, ...) int or (B, ..., C) float, and a dropout key."""
    return MappedBatch(images, labels, jnp.arange(images.shape[0]) < count, dropout_key)


def compute_norm(gradients: Any, unscale: Array) -> Array:
    """Return the norm of the unscaled gradients, float32 (), from gradients of the scaled loss."""
    return optax.tree.norm(gradients) * unscale


def make_estimated_step(
    config: StepConfig, learning_rate: float
) -> Callable[[TrainState, tuple[Array, Array]], tuple[TrainState, Array]]:
    """Make a step for cost estimates: (state, (images, labels)) -> (new state, loss).

    Images are (B, H, W, C) float32, after the map ops. The step trains the parameters of the last
    phase, which are the most. It has no map ops, loss scale, gradient norm, ledger or check for
    non-finite values.
    """
    config = select_phase(config, config.phases[-1].start if config.phases else 0)
    config = replace(config, ledger_samples=None)
    groups = len(config.rate_groups)
    rates = jnp.full(1 + groups, learning_rate) if groups else learning_rate

    def step(state: TrainState, batch: tuple[Array, Array]) -> tuple[TrainState, Array]:
        images, labels = batch
        count = images.shape[0]
        dropout_key = jax.random.fold_in(jax.random.key(0), state.step)
        mapped = mask_batch(images, labels, count, dropout_key)
        divisor = compute_divisor(config, labels, mapped.mask, count)
        gradients = compute_gradients(config, state, mapped, divisor, 1.0)
        return apply_update(config, state, gradients, count, 1.0, rates), gradients.loss

    return step


def make_zero_sums(config: StepConfig) -> EvalSums:
    has_classes = config.task == "classification"
    return zero_sums(config.classes, config.metrics, has_classes=has_classes)


def get_evaluated_weights(config: StepConfig, state: TrainState) -> dict[str, Any]:
    """Return the variables for an evaluation. The moving average of the trained parameters, if the
    state has one, replaces these parameters."""
    params = state.params
    if config.average is not None:
        params = merge_params(params, state.average)
    return {"params": params, "batch_stats": state.batch_stats}


def predict(config: StepConfig, variables: Any, batch: Batch) -> tuple[Array, Array]:
    """Return the logits of a batch in evaluation mode, and its labels."""
    images, labels = map_batch(config, config.eval_ops, batch)
    apply = config.apply_lowerings(partial(config.network.apply, train=False))
    logits: Any = apply(variables, images)
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


def init_with_output(config: StepConfig, seed: Array) -> tuple[Array, Mapping[str, Any]]:
    """Return the logits of one blank image, and the initial parameters and batch statistics. Raises
    ValueError if layers don't fit together, or a rule for initialisation doesn't fit."""
    image = jnp.zeros((1, *get_image_shape(config.image)), jnp.float32)
    logits, variables = config.network.init_with_output(_make_key(seed, 0), image, train=False)
    params = reinitialize(variables["params"], config.init_rules, _make_key(seed, 2))
    return logits, {**variables, "params": params}


def init_state(config: StepConfig, variables: Mapping[str, Any]) -> TrainState:
    """Return the state at step 0, from initial parameters and batch statistics."""
    params = variables["params"]
    trained, _ = split_params(params, config.never_trained)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        batch_stats=variables.get("batch_stats", {}),
        opt_state=config.optimizer.init(trained),
        loss_scale=jnp.asarray(config.loss_scale.initial, jnp.float32),
        overflows=OverflowCounts(zero, zero, zero) if config.loss_scale.skips_overflow else None,
        average=None if config.average is None else jax.tree.map(jnp.copy, trained),
        bad_steps=NonFiniteStepCounts(zero, zero) if config.on_nan.counts_steps else None,
        privacy=None if config.privacy is None else config.privacy.init(),
        ledger=None if config.ledger_samples is None else make_ledger(config.ledger_samples),
    )


def _make_key(seed: Array, stream: int) -> Array:
    """Return a JAX key from a seed, uint32 (2,). Stream 0 is for initialisation, stream 1 for
    dropout, stream 2 for initialisation by rules."""
    key = jax.random.wrap_key_data(seed.astype(jnp.uint32), impl="threefry2x32")
    return jax.random.fold_in(key, stream)


def get_image_shape(image: ColumnSpec) -> tuple[int, ...]:
    """Return the height, width and channels of an image, in either layout of the map ops."""
    return image.shape if image.layout == "hwc" else (*image.shape[1:], image.shape[0])
