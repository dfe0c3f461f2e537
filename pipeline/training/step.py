"""One training step, its initial state and its evaluation, as pure functions.

Nothing here knows how often, where or in what order the functions are called: that is the sink's
and the backend's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pipeline.data.batch import Batch
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import Ops
from pipeline.data.padding.buckets import SIZE
from pipeline.data.transform import apply_ops
from pipeline.training.bucketing import in_its_bucket, with_padding_mask
from pipeline.training.gradients import Gradients, compute_gradients
from pipeline.training.loss_reduction import label_mask, sample_losses
from pipeline.training.metrics import EvalSums, add_batch, zero_sums
from pipeline.training.parameters import merge, reinitialize, split
from pipeline.training.state import Record, TrainState
from pipeline.training.step_parts import StepConfig as StepConfig
from pipeline.training.update import (
    apply_if_finite,
    apply_update,
    count_overflow,
    init_bad_step_counts,
    is_skipped,
    no_overflows,
    skip_bad_step,
    updates_so_far,
)


@dataclass(frozen=True)
class TrainStep:
    """The three pure functions that a backend compiles.

    `init(seed)` makes the state at step 0 from uint32 (2,). `step(state, batch, learning_rates)`
    does one update; the table is float32 (total steps,), a row for each update. A step whose loss
    or gradient is not finite leaves the state as it was, but for what counts such steps.
    `evaluate(state, batch, sums)` adds a batch to the sums.
    """

    init: Callable[[Array], TrainState]
    step: Callable[[TrainState, Batch, Array], tuple[TrainState, Record]]
    evaluate: Callable[[TrainState, Batch, EvalSums], EvalSums]
    zero_sums: Callable[[], EvalSums]


def make_train_step(parts: StepConfig) -> TrainStep:
    """Put the parts of a step together."""

    def init(seed: Array) -> TrainState:
        return initial_state(parts, initial_variables(parts, seed)[1])

    def step(state: TrainState, batch: Batch, learning_rates: Array) -> tuple[TrainState, Record]:
        return in_its_bucket(
            parts.buckets, batch, lambda cut: _update(parts, state, cut, learning_rates)
        )

    def evaluate(state: TrainState, batch: Batch, sums: EvalSums) -> EvalSums:
        return in_its_bucket(
            parts.buckets, batch, lambda cut: _evaluate(parts, state, cut, sums), drawn=False
        )

    return TrainStep(init, step, evaluate, lambda: zero_sums(parts.classes))


def initial_variables(parts: StepConfig, seed: Array) -> tuple[Array, Mapping[str, Any]]:
    """Logits of one blank image, and fresh parameters and batch statistics.

    Raises ValueError where layers don't fit, or a rule for initialisation does not.
    """
    height, width, channels = image_shape(parts.image)
    image = jnp.zeros((1, height, width, channels), jnp.float32)
    logits, variables = parts.network.init_with_output(_key(seed, 0), image, train=False)
    params = reinitialize(variables["params"], parts.init_rules, _key(seed, 2))
    return logits, {**variables, "params": params}


def initial_state(parts: StepConfig, variables: Mapping[str, Any]) -> TrainState:
    """The state at step 0 of fresh parameters and batch statistics."""
    params = variables["params"]
    trained, _ = split(params, parts.frozen)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        batch_stats=variables.get("batch_stats", {}),
        opt_state=parts.optimizer.init(trained),
        loss_scale=jnp.asarray(parts.loss_scale.initial, jnp.float32),
        overflows=no_overflows(parts.loss_scale),
        average=None if parts.average is None else jax.tree.map(jnp.copy, trained),
        bad_steps=init_bad_step_counts(parts.on_nan),
    )


def _key(seed: Array, stream: int) -> Array:
    """A JAX key from the two words of the seed; streams 0 to 2 are initialisation, dropout, and
    initialisation by rules."""
    key = jax.random.wrap_key_data(seed.astype(jnp.uint32), impl="threefry2x32")
    return jax.random.fold_in(key, stream)


def image_shape(image: ColumnSpec) -> tuple[int, ...]:
    """Height, width and channels of an image, however the map ops leave it."""
    return image.shape if image.layout == "hwc" else (*image.shape[1:], image.shape[0])


def _mapped(parts: StepConfig, ops: Ops, batch: Batch) -> tuple[Array, Array]:
    """Images NHWC float32 and labels of a batch after its map ops."""
    columns = apply_ops(jnp, ops, batch.columns, batch.seed, batch.pass_, batch.sample)
    sizes = batch.columns[SIZE] if parts.padding_mask else None
    return network_inputs(columns["image"], parts.image.layout, sizes), columns["label"]


def network_inputs(images: Array, layout: str, sizes: Array | None) -> Array:
    """What a network reads of images as the map ops leave them: NHWC float32.

    Where their true sizes (B, 1 or 2) are given, it has a channel more that tells padding.
    """
    images = images.astype(jnp.float32)
    images = images if layout == "hwc" else images.transpose(0, 2, 3, 1)
    return images if sizes is None else with_padding_mask(images, sizes)


def gradients_of(parts: StepConfig, state: TrainState, batch: Batch) -> Gradients:
    """What a step computes of a batch, which is in its bucket, before it updates anything.

    The gradients are those of the loss times its scale.
    """
    images, labels = _mapped(parts, parts.train_ops, batch)
    dropout = jax.random.fold_in(_key(batch.seed, 1), state.step)
    return compute_gradients(parts, state, images, labels, batch.count, dropout, state.loss_scale)


def norm_of(gradients: Any, unscale: Array) -> Array:
    """The norm of the gradients of the loss itself, float32 (), from those of the scaled loss."""
    return optax.tree.norm(gradients) * unscale


def _update(
    parts: StepConfig, state: TrainState, batch: Batch, learning_rates: Array
) -> tuple[TrainState, Record]:
    gradients = gradients_of(parts, state, batch)
    # Times the inverse, which XLA computes where a gradient is read: a quotient it would store, a
    # pass over all parameters more. The norm is that of the scaled gradients for the same reason.
    unscale = 1 / state.loss_scale
    rate = learning_rates[jnp.minimum(updates_so_far(state), learning_rates.shape[0] - 1)]
    loss, norm = gradients.loss, norm_of(gradients.values, unscale)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    skipped = is_skipped(state.overflows, loss, norm)
    record = Record(loss, rate, norm, state.loss_scale, skipped.astype(jnp.float32))

    def advanced(state: TrainState) -> TrainState:
        values = jax.tree.map(lambda g: g * unscale, gradients.values)
        unscaled = gradients._replace(values=values)
        return apply_update(parts, state, unscaled, batch.count, unscale, rate)

    after = apply_if_finite(finite, advanced, state)
    after = count_overflow(parts.loss_scale, after, finite, skipped)
    return skip_bad_step(parts.on_nan, after, record)


def make_update_only_step(
    parts: StepConfig, learning_rate: float
) -> Callable[[TrainState, tuple[Array, Array]], tuple[TrainState, Array]]:
    """The update alone, on mapped images (B, H, W, C) float32 and labels: what a device is
    priced for.

    It has neither the map ops, which are the host's there, nor the loss scale, nor the gradient's
    norm and the guard against what is not finite, which are this pipeline's telemetry.
    """

    def step(state: TrainState, batch: tuple[Array, Array]) -> tuple[TrainState, Array]:
        images, labels = batch
        count, dropout = images.shape[0], jax.random.fold_in(jax.random.key(0), state.step)
        gradients = compute_gradients(parts, state, images, labels, count, dropout, 1.0)
        return apply_update(parts, state, gradients, count, 1.0, learning_rate), gradients.loss

    return step


def _evaluate(parts: StepConfig, state: TrainState, batch: Batch, sums: EvalSums) -> EvalSums:
    images, labels = _mapped(parts, parts.eval_ops, batch)
    params = state.params
    if parts.average is not None:
        params = merge(state.average, split(params, parts.frozen)[1])
    weights = {"params": params, "batch_stats": state.batch_stats}
    logits: Any = parts.network.apply(weights, images, train=False)
    mask = jnp.arange(images.shape[0]) < batch.count
    losses = sample_losses(parts, logits, labels)
    return add_batch(sums, logits, labels, losses, mask, label_mask(parts, labels))
