"""One training step, its initial state and its evaluation, as pure functions.

Nothing here knows how often, where or in what order the functions are called: that is the sink's
and the backend's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from pipeline.data.columns import ColumnSpec
from pipeline.data.spec import Ops
from pipeline.data.transform import apply_ops
from pipeline.training.metrics import EvalSums, add_batch, zero_sums
from pipeline.training.state import Array, Batch, Record, TrainState

SampleLoss = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class TrainStep:
    """The three pure functions that a backend compiles.

    `init(seed)` makes the state at step 0 from uint32 (2,). `step(state, batch, learning_rates)`
    does one update; the table is float32 (total steps,). A step whose loss or gradient is not
    finite leaves the state as it was. `evaluate(state, batch, sums)` adds a batch to the sums.
    """

    init: Callable[[Array], TrainState]
    step: Callable[[TrainState, Batch, Array], tuple[TrainState, Record]]
    evaluate: Callable[[TrainState, Batch, EvalSums], EvalSums]
    zero_sums: Callable[[], EvalSums]


@dataclass(frozen=True)
class StepParts:
    """What the functions are made of; `image` is one image as the ops leave it."""

    network: nn.Module
    image: ColumnSpec
    classes: int
    train_ops: Ops
    eval_ops: Ops
    loss: SampleLoss
    reduction: Literal["mean", "sum"]
    optimizer: optax.GradientTransformation
    loss_scale: float


def make_train_step(parts: StepParts) -> TrainStep:
    """Put the parts of a step together."""

    def init(seed: Array) -> TrainState:
        return initial_state(parts, initial_variables(parts, seed))

    def step(state: TrainState, batch: Batch, learning_rates: Array) -> tuple[TrainState, Record]:
        return _update(parts, state, batch, learning_rates)

    def evaluate(state: TrainState, batch: Batch, sums: EvalSums) -> EvalSums:
        return _evaluate(parts, state, batch, sums)

    return TrainStep(init, step, evaluate, lambda: zero_sums(parts.classes))


def initial_variables(parts: StepParts, seed: Array) -> Mapping[str, Any]:
    """Fresh parameters and batch statistics. Raises ValueError where layers don't fit."""
    height, width, channels = image_shape(parts.image)
    image = jnp.zeros((1, height, width, channels), jnp.float32)
    return parts.network.init(_key(seed, 0), image, train=False)


def initial_state(parts: StepParts, variables: Mapping[str, Any]) -> TrainState:
    """The state at step 0 of fresh parameters and batch statistics."""
    params = variables["params"]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        batch_stats=variables.get("batch_stats", {}),
        opt_state=parts.optimizer.init(params),
        loss_scale=jnp.asarray(parts.loss_scale, jnp.float32),
    )


def _key(seed: Array, stream: int) -> Array:
    """A JAX key from the two words of the seed; streams 0 and 1 are initialisation and dropout."""
    key = jax.random.wrap_key_data(seed.astype(jnp.uint32), impl="threefry2x32")
    return jax.random.fold_in(key, stream)


def image_shape(image: ColumnSpec) -> tuple[int, ...]:
    """Height, width and channels of an image, however the map ops leave it."""
    return image.shape if image.layout == "hwc" else (*image.shape[1:], image.shape[0])


def _mapped(ops: Ops, image: ColumnSpec, batch: Batch) -> tuple[Array, Array]:
    """Images NHWC float32 and labels of a batch after its map ops."""
    columns = apply_ops(jnp, ops, batch.columns, batch.seed, batch.pass_, batch.sample)
    images = columns["image"].astype(jnp.float32)
    return images if image.layout == "hwc" else images.transpose(0, 2, 3, 1), columns["label"]


def _update(
    parts: StepParts, state: TrainState, batch: Batch, learning_rates: Array
) -> tuple[TrainState, Record]:
    images, labels = _mapped(parts.train_ops, parts.image, batch)
    dropout = jax.random.fold_in(_key(batch.seed, 1), state.step)
    scaled, (loss, batch_stats) = _gradients(parts, state, images, labels, batch.count, dropout)
    # Times the inverse, which XLA computes where a gradient is read: a quotient it would store, a
    # pass over all parameters more. The norm is that of the scaled gradients for the same reason.
    unscale = 1 / state.loss_scale
    rate = learning_rates[jnp.minimum(state.step, learning_rates.shape[0] - 1)]
    record = Record(loss, rate, optax.tree.norm(scaled) * unscale, state.loss_scale)

    def advance(state: TrainState) -> TrainState:
        gradients = jax.tree.map(lambda g: g * unscale, scaled)
        return _advance(parts, state, gradients, batch_stats, rate)

    finite = jnp.isfinite(record.loss) & jnp.isfinite(record.grad_norm)
    return _advance_if(finite, advance, state), record


def _advance_if(
    finite: Array, advance: Callable[[TrainState], TrainState], state: TrainState
) -> TrainState:
    """The state advanced, or as it was.

    The CPU branches, which spares it the copies that a choice between two states needs. Elsewhere
    a branch would wait for the host to read the condition.
    """

    def branch(finite: Array, state: TrainState) -> TrainState:
        return jax.lax.cond(finite, advance, lambda state: state, state)

    def choose(finite: Array, state: TrainState) -> TrainState:
        return jax.tree.map(
            lambda now, before: jnp.where(finite, now, before), advance(state), state
        )

    return jax.lax.platform_dependent(finite, state, cpu=branch, default=choose)


def make_bare_step(
    parts: StepParts, learning_rate: float
) -> Callable[[TrainState, tuple[Array, Array]], tuple[TrainState, Array]]:
    """The update alone, on mapped images (B, H, W, C) float32 and labels: what a device is
    priced for.

    It has neither the map ops, which are the host's there, nor the gradient's norm and the guard
    against what is not finite, which are this pipeline's telemetry.
    """

    def step(state: TrainState, batch: tuple[Array, Array]) -> tuple[TrainState, Array]:
        images, labels = batch
        dropout = jax.random.fold_in(jax.random.key(0), state.step)
        gradients, (loss, batch_stats) = _gradients(
            parts, state, images, labels, images.shape[0], dropout, scaled=False
        )
        return _advance(parts, state, gradients, batch_stats, learning_rate), loss

    return step


def _gradients(
    parts: StepParts,
    state: TrainState,
    images: Array,
    labels: Array,
    count: Array | int,
    dropout: Array,
    *,
    scaled: bool = True,
) -> tuple[Any, tuple[Array, Any]]:
    """Gradients of the scaled loss; the loss itself and the new batch statistics."""

    def scaled_loss(params: Any) -> tuple[Array, tuple[Array, Any]]:
        logits, changed = parts.network.apply(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": dropout},
        )
        loss = _reduced(parts, parts.loss(logits, labels), count)
        scale = state.loss_scale if scaled else 1.0
        return loss * scale, (loss, changed.get("batch_stats", {}))

    return jax.grad(scaled_loss, has_aux=True)(state.params)


def _reduced(parts: StepParts, losses: Array, count: Array | int) -> Array:
    """The loss of a batch over its real samples."""
    real = jnp.where(jnp.arange(losses.shape[0]) < count, losses, 0.0)
    return real.sum() / count if parts.reduction == "mean" else real.sum()


def _advance(
    parts: StepParts, state: TrainState, gradients: Any, batch_stats: Any, rate: Array | float
) -> TrainState:
    directions, opt_state = parts.optimizer.update(gradients, state.opt_state, state.params)
    params = jax.tree.map(lambda p, d: p - rate * d, state.params, directions)
    return TrainState(state.step + 1, params, batch_stats, opt_state, state.loss_scale)


def _evaluate(parts: StepParts, state: TrainState, batch: Batch, sums: EvalSums) -> EvalSums:
    images, labels = _mapped(parts.eval_ops, parts.image, batch)
    weights = {"params": state.params, "batch_stats": state.batch_stats}
    logits: Any = parts.network.apply(weights, images, train=False)
    mask = jnp.arange(images.shape[0]) < batch.count
    return add_batch(sums, logits, labels, parts.loss(logits, labels), mask)
