"""The part of each sample in the loss and the gradient of a training step.

The loss of a step is a sum of terms, one for each sample, and its gradient is the sum of the
gradients of these terms. They are computed by the functions of the step: the same map ops, dropout,
microbatches and features. With batch norm a term depends on the other samples, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.data.batch import Batch
from pipeline.training.bucketing import apply_in_bucket
from pipeline.training.forward_pass import ForwardPass, Outputs
from pipeline.training.losses import reduce_losses
from pipeline.training.state import Inputs, MappedBatch, TrainState
from pipeline.training.step import compute_norm, compute_step_gradients, get_loss_scale
from pipeline.training.step_config import StepConfig
from pipeline.training.step_feature import StepFeature

SELECTED = "selected by sample_terms"
"""Column that marks the samples whose gradients are computed."""


@dataclass(frozen=True)
class SampleTerms(StepFeature):
    """Reads the term of each sample, and leaves the gradients of others than the selected ones out.

    The losses keep their values, so a feature that selects the hardest samples selects the same.
    """

    name: ClassVar[str] = "sample_terms"

    def draw(self, batch: Batch, inputs: Inputs) -> Array:
        return batch.columns[SELECTED]

    def change_outputs(self, forward: ForwardPass, trained: Any, outputs: Outputs) -> Outputs:
        batch = forward.batch
        values = jax.lax.stop_gradient(outputs.losses)

        def reduce_moved(added: Array) -> Array:
            moved = values + added
            mask = batch.mask
            loss = reduce_losses(forward.config, moved, batch.labels, mask, forward.divisor)
            return loss.reported

        # By how much the loss of the step grows with the loss of a sample; without padding.
        weights = jax.grad(reduce_moved)(jnp.zeros_like(values))
        rows = jnp.stack([values, weights], axis=1)
        losses = jnp.where(batch.extras[self.name], outputs.losses, values)
        return outputs._replace(losses=losses, sums={**outputs.sums, self.name: rows})

    def read_samples(self, outputs: Outputs, batch: MappedBatch, valid: Array) -> Array:
        rows: Array = outputs.sums[self.name]
        return rows


class _Gradients(NamedTuple):
    values: Any
    """Unscaled gradients of the selected samples' terms, by trained parameter."""
    loss: Array
    rows: Array
    """Loss and weight of each sample, float32 (B, 2)."""


@dataclass(frozen=True, eq=False)
class SampleShares:
    """Parts of a batch's samples in a step; arrays of its valid samples, (n,)."""

    loss: float
    """Loss of the step, computed by itself: its last digits may differ from the run's."""
    losses: np.ndarray
    """Loss of each sample."""
    terms: np.ndarray
    """Its part of the step's loss."""
    loss_shares: np.ndarray
    """Its term by the loss; the shares add up to 1."""
    other_losses: np.ndarray
    """Loss of the step without each sample, a mean over the others if the loss is a mean."""
    gradient_norms: np.ndarray
    """Norm of the gradient of its term."""
    gradient_shares: np.ndarray
    """Part of the step's gradient in its direction; the shares add up to 1. NaN if the gradient of
    the step isn't finite."""
    are_finite: np.ndarray
    """bool (n,): False for the samples without which the step is finite."""
    gradients: dict[str, np.ndarray]
    """Unscaled gradient of the step, by path of parameter."""

    def rank(self) -> np.ndarray:
        """Return the positions of all samples: at first those that aren't finite, then by the
        greater one of both shares."""
        shares = np.fmax(np.abs(self.loss_shares), np.abs(self.gradient_shares))
        return np.lexsort((-np.nan_to_num(shares), self.are_finite))


def measure_samples(
    config: StepConfig,
    state: TrainState,
    batch: Batch,
    note_progress: Callable[[int], None] = lambda _: None,
) -> SampleShares:
    """Compute the contributions of a batch's samples: a backward pass for each.

    `config` is of the phase of the step, `state` the state before it. `note_progress` is called
    with the number of samples that are done.
    """
    is_mean = config.objective.reduction != "sum"
    state = config.select_gradient_state(state)
    config = replace(config, features=(*config.features, SampleTerms()))
    compute = jax.jit(partial(_compute_gradients, config))
    compute_share = jax.jit(partial(_compute_share, config))
    size = len(np.asarray(batch.sample))
    count = int(batch.count)
    everything = np.ones(size, bool)
    totals = compute(state, batch, everything)
    rows = np.asarray(totals.rows, np.float64)[:count]
    losses, weights = rows.T
    # A sample that isn't selected may have any loss.
    terms = np.where(weights > 0, losses, 0) * weights
    norms = np.full(count, np.nan)
    shares = np.full(count, np.nan)
    are_finite = np.isfinite(terms)
    if _are_finite(totals):
        square = float(compute_norm(totals.values, 1.0)) ** 2
        for position in range(count):
            selected = np.arange(size) == position
            norm, product = compute_share(state, batch, selected, totals.values)
            norms[position] = norm
            shares[position] = product / square if square else np.nan
            note_progress(position + 1)
    elif are_finite.all():
        for position in range(count):
            # Another sample in its place: if the step is finite then, it was this one.
            replaced = compute(state, _repeat_sample(batch, position, count), everything)
            are_finite[position] = not _are_finite(replaced)
            note_progress(position + 1)
    total = terms.sum()
    with np.errstate(all="ignore"):
        sums = np.array([terms[np.arange(count) != position].sum() for position in range(count)])
        other_losses = sums / (1 - weights / weights.sum()) if is_mean else sums
        return SampleShares(
            loss=float(totals.loss),
            losses=losses,
            terms=terms,
            loss_shares=terms / total,
            other_losses=other_losses,
            gradient_norms=norms,
            gradient_shares=shares,
            are_finite=are_finite,
            gradients=jax.tree.map(np.asarray, flatten_by_path(totals.values)),
        )


def _compute_gradients(
    config: StepConfig, state: TrainState, batch: Batch, selected: Array
) -> _Gradients:
    marked = replace(batch, columns={**batch.columns, SELECTED: selected})

    def compute(cropped: Batch) -> _Gradients:
        gradients = compute_step_gradients(config, state, cropped)
        unscale = 1 / get_loss_scale(config, state)
        values = jax.tree.map(lambda g: g * unscale, gradients.values)
        return _Gradients(values, gradients.loss, gradients.readings[SampleTerms.name])

    result: _Gradients = apply_in_bucket(config.padding, marked, compute)
    return result


def _compute_share(
    config: StepConfig, state: TrainState, batch: Batch, selected: Array, totals: Any
) -> tuple[Array, Array]:
    """Return the norm of the gradient of the selected samples, and its product with the whole."""
    values = _compute_gradients(config, state, batch, selected).values
    products = jax.tree.map(lambda part, total: jnp.vdot(part, total), values, totals)
    return compute_norm(values, 1.0), sum(jax.tree.leaves(products), jnp.float32(0))


def _are_finite(gradients: _Gradients) -> bool:
    return bool(np.isfinite(gradients.loss)) and bool(
        np.isfinite(compute_norm(gradients.values, 1.0))
    )


def _repeat_sample(batch: Batch, position: int, count: int) -> Batch:
    """Return a batch that has the next sample at a position."""
    other = (position + 1) % count
    rows = np.arange(len(np.asarray(batch.sample)))
    rows[position] = other
    columns = {name: jnp.asarray(column)[rows] for name, column in batch.columns.items()}
    return replace(batch, columns=columns, sample=jnp.asarray(batch.sample)[rows])
