"""The ledger of the training samples: what each step's outputs show about each sample's label.

Each step takes one reading of each sample in its batch. The ledger is a part of the training state,
and its rows are the samples by number. A step whose update isn't applied adds no readings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.training.forward_pass import Outputs
from pipeline.training.state import MappedBatch
from pipeline.training.step_feature import StepFeature
from pipeline.training.telemetry import StepOutcome

EARLY_READINGS = 5
"""Number of readings of a sample whose gradient norms are added, from the first one on: EL2N is
measured early in training."""


class Readings(NamedTuple):
    """Figures of a step's samples, computed from the network's outputs; arrays are (B,)."""

    loss: Array
    """Cross-entropy, -log p of the label, float32, also if training minimises another loss."""
    margin: Array
    """Logit of the label minus the largest other logit, float32."""
    gradient_norm: Array
    """Norm of p - y, float32: the gradient of the cross-entropy by the logits, for probabilities p
    and a one-hot label y. Times the norm of the last layer's input, it is the norm of the gradient
    of the last layer's weights."""
    rival: Array
    """The class of the largest other logit, int32."""
    valid: Array
    """1 for a sample with a label, 0 for padding and ignored labels, int32."""


@register_dataclass
@dataclass(frozen=True)
class SampleLedger:
    """Readings of each training sample so far, arrays (n,). Field names are keys in checkpoints."""

    loss: Array
    """The last loss, float32."""
    margin_sum: Array
    """float32. Divided by `readings` it is the area under the margin (Pleiss et al.,
    Identifying mislabeled data using the area under the margin ranking, 2020)."""
    early_gradient_sum: Array
    """Sum of the first `EARLY_READINGS` gradient norms, float32 (EL2N: Paul et al., Deep learning
    on a data diet, 2021)."""
    readings: Array
    """Number of readings, int32."""
    learnt: Array
    """The number of times that the prediction became right, int32."""
    forgotten: Array
    """The number of times that the prediction became wrong, int32 (Toneva et al., An empirical
    study of example forgetting, 2019). If it is below `learnt`, the last prediction was right."""
    rival: Array
    """`Readings.rival` of the last reading whose margin was at most the mean of the earlier
    margins, int32. Readings with larger margins are left out, since the network may have memorised
    a wrong label by then."""


@dataclass(frozen=True)
class Ledger(StepFeature):
    """The ledger of a number of training samples."""

    name: ClassVar[str] = "ledger"
    samples: int

    def init(self, trained: Any) -> SampleLedger:
        return make_ledger(self.samples)

    def read_samples(self, outputs: Outputs, batch: MappedBatch, valid: Array) -> Readings:
        return read_samples(outputs.logits, batch.labels, valid)

    def add_readings(
        self,
        part: SampleLedger,
        rows: Array,
        readings: Readings,
        outcome: StepOutcome,
        *,
        repeats: bool,
    ) -> SampleLedger:
        return add_readings(part, rows, readings, outcome.applied, repeats=repeats)


def make_ledger(samples: int) -> SampleLedger:
    """Return the ledger of a number of samples before the first step."""
    floats = jnp.zeros(samples, jnp.float32)
    integers = jnp.zeros(samples, jnp.int32)
    return SampleLedger(
        loss=floats,
        margin_sum=floats,
        early_gradient_sum=floats,
        readings=integers,
        learnt=integers,
        forgotten=integers,
        rival=integers,
    )


def read_samples(logits: Array, labels: Array, mask: Array) -> Readings:
    """Return the readings of a batch after the map ops.

    Takes logits (B, C), labels, int (B,) or one-hot (B, C), and a mask of samples with a label,
    bool (B,). The formulas differ from the loss's on purpose. XLA would compute a common
    expression once, and that would change the fusion and the rounding of the loss.
    """
    logits = jax.lax.stop_gradient(logits).astype(jnp.float32)
    classes = labels if labels.ndim == 1 else labels.argmax(axis=-1)
    is_label = classes[:, None] == jnp.arange(logits.shape[-1])
    others = jnp.where(is_label, -jnp.inf, logits)
    label_logit = jnp.where(is_label, logits, 0).sum(axis=-1)
    margin = label_logit - others.max(axis=-1)
    # exp(logit - m) of each other class, where m is the larger of the label's logit and the largest
    # other logit.
    shift = jnp.maximum(-margin, 0)
    odds = jnp.exp(others - (label_logit + shift)[:, None])
    label_odds = jnp.exp(-shift)
    other_odds = odds.sum(axis=-1)
    total = label_odds + other_odds
    squares = jnp.square(odds).sum(axis=-1) + jnp.square(other_odds)
    return Readings(
        loss=jnp.log(total) + shift,
        margin=margin,
        gradient_norm=jnp.sqrt(squares) / total,
        rival=others.argmax(axis=-1).astype(jnp.int32),
        valid=mask.astype(jnp.int32),
    )


def add_readings(
    ledger: SampleLedger, rows: Array, readings: Readings, applied: Array, *, repeats: bool
) -> SampleLedger:
    """Return the ledger after a step with the samples `rows`, int32 (B,). `applied`, bool (), is
    whether the step's update was applied. `repeats` is whether a batch may contain a sample twice;
    then only its first reading is added."""
    num_samples = ledger.loss.shape[0]
    positions = jnp.arange(rows.shape[0])
    is_counted = (readings.valid > 0) & applied
    if repeats:
        is_same_sample = (rows[:, None] == rows) & is_counted
        is_counted &= ~jnp.tril(is_same_sample, -1).any(axis=1)
    # Uncounted samples get row numbers past the end, which mode="drop" ignores. All numbers are
    # distinct, as `unique_indices` requires.
    rows = jnp.where(is_counted, rows, num_samples + positions)
    was_right = (ledger.learnt - ledger.forgotten).at[rows].get(mode="clip") > 0
    is_right = readings.margin > 0
    num_earlier = ledger.readings.at[rows].get(mode="clip")
    is_early = num_earlier < EARLY_READINGS
    is_below_mean = readings.margin * num_earlier <= ledger.margin_sum.at[rows].get(mode="clip")
    last_rival = ledger.rival.at[rows].get(mode="clip")

    def add(total: Array, values: Array) -> Array:
        return total.at[rows].add(values.astype(total.dtype), mode="drop", unique_indices=True)

    def put(last: Array, values: Array) -> Array:
        return last.at[rows].set(values, mode="drop", unique_indices=True)

    return SampleLedger(
        loss=put(ledger.loss, readings.loss),
        margin_sum=add(ledger.margin_sum, readings.margin),
        early_gradient_sum=add(
            ledger.early_gradient_sum, jnp.where(is_early, readings.gradient_norm, 0)
        ),
        readings=add(ledger.readings, jnp.ones_like(rows)),
        learnt=add(ledger.learnt, is_right & ~was_right),
        forgotten=add(ledger.forgotten, ~is_right & was_right),
        rival=put(ledger.rival, jnp.where(is_below_mean, readings.rival, last_rival)),
    )
