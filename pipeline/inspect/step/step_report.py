"""Report of a step of a run: its record, features, gradients by layer, and samples.

The report has the part of each sample in the loss and the gradient.

The loss of a step is a sum of terms, one for each sample, and its gradient is the sum of the
gradients of these terms. They are computed by the functions of the step: the same map ops, dropout,
microbatches and features. With batch norm a term depends on the other samples, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.config.recipe import Recipe
from pipeline.core.errors import printable
from pipeline.core.files.value_text import align_columns, join_first
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.data.batch import Batch
from pipeline.data.columns import Split, Targets
from pipeline.data.row_views import find_place
from pipeline.stages.sample_pictures import format_label
from pipeline.training.bucketing import apply_in_bucket
from pipeline.training.features.freezing import Freezing
from pipeline.training.features.loss_scales import ScaledLoss
from pipeline.training.forward_pass import ForwardPass, Outputs
from pipeline.training.losses import reduce_losses
from pipeline.training.state import Inputs, MappedBatch, TrainState, split_params
from pipeline.training.step import compute_norm, compute_step_gradients, get_loss_scale
from pipeline.training.step_config import StepConfig
from pipeline.training.step_feature import StepFeature
from pipeline.training.telemetry import Telemetry

SHOWN_SAMPLES = 20
SHOWN_LAYERS = 20
SHOWN_FROZEN = 5
LABELED = ("classification", "regression", "multi_label")
"""Tasks whose labels are shown."""
MAX_LABELS = 64
NOT_FINITE = "isn't finite"
SELECTED = "selected by sample_terms"
"""Column that marks the samples whose gradients are computed."""


@dataclass(frozen=True)
class StepLayer:
    """Gradient and weights of a layer's trained parameters at a step."""

    layer: str
    gradient_norm: float
    gradient_share: float
    """Its part of the squared norm of all gradients."""
    weight_norm: float
    """Norm of the parameters before the step."""
    learning_rate: float


@dataclass(frozen=True)
class SampleRow:
    """Part of a sample in a step; figures are None if they aren't finite."""

    position: int
    """Position in the batch, from 0 on."""
    sample: int
    """Row in the training split as it was read."""
    place: str
    """File of the sample, also with its line; "" if unknown."""
    label: str
    loss: float | None
    loss_share: float | None
    gradient_norm: float | None
    gradient_share: float | None
    other_loss: float | None
    """Loss of the step without the sample."""
    finite: bool
    """False if the step is finite without the sample."""


def place_samples(split: Split, batch: Batch) -> list[tuple[int, str]]:
    """Return for each valid sample its row in the training split as it was read, and its place."""
    samples = np.asarray(batch.sample)[: int(batch.count)]
    if batch.num_samples is not None:
        samples = samples % batch.num_samples
    rows = split.list_rows()
    return [(int(rows[sample]), find_place(split, int(sample))) for sample in samples]


def make_sample_rows(
    shares: SampleShares, batch: Batch, places: Sequence[tuple[int, str]], targets: Targets
) -> list[SampleRow]:
    """Return the rows of all samples by rank (`SampleShares.rank`)."""
    labels = np.asarray(batch.columns["label"])
    rows = []
    for position in shares.rank().tolist():
        sample, place = places[position]
        label = labels[position]
        has_text = targets.task in LABELED and label.ndim <= 1 and label.size <= MAX_LABELS
        text = format_label(label, targets) if has_text else ""
        rows.append(
            SampleRow(
                position,
                sample,
                printable(place),
                printable(text),
                _to_number(shares.losses[position]),
                _to_number(shares.loss_shares[position]),
                _to_number(shares.gradient_norms[position]),
                _to_number(shares.gradient_shares[position]),
                _to_number(shares.other_losses[position]),
                bool(shares.are_finite[position]),
            )
        )
    return rows


def _to_number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def make_layer_rows(
    config: StepConfig, state: TrainState, shares: SampleShares, rates: np.ndarray
) -> list[StepLayer]:
    """Return a row for each layer with trained parameters, in the order of their names.

    `rates` is the step's row of the learning rates, () or (1 + groups,).
    """
    find_rate = _make_find_rate(config, rates)
    params = flatten_by_path(state.params)
    squares: dict[str, float] = {}
    weights: dict[str, float] = {}
    layer_rates: dict[str, float] = {}
    for path, gradient in shares.gradients.items():
        layer = path.rpartition("/")[0] or path
        squares[layer] = squares.get(layer, 0.0) + _sum_squares(gradient)
        weights[layer] = weights.get(layer, 0.0) + _sum_squares(params[path])
        layer_rates[layer] = find_rate(tuple(path.split("/")))
    total = sum(squares.values())
    return [
        StepLayer(
            layer,
            float(np.sqrt(square)),
            square / total if total else 0.0,
            float(np.sqrt(weights[layer])),
            layer_rates[layer],
        )
        for layer, square in squares.items()
    ]


def _make_find_rate(config: StepConfig, rates: np.ndarray) -> Callable[[tuple[str, ...]], float]:
    features = config.list_acting("find_rate")
    first: Any = np.asarray(rates)

    def find_rate(path: tuple[str, ...]) -> float:
        rate = reduce(lambda rate, feature: feature.find_rate(path, rate), features, first)
        return float(np.asarray(rate).reshape(-1)[0])

    return find_rate


def _sum_squares(array: Any) -> float:
    return float(np.sum(np.square(np.asarray(array, np.float64))))


def list_features(
    recipe: Recipe, config: StepConfig, state: TrainState, record: Telemetry
) -> list[str]:
    """Return a text for each feature of the recipe that acted at the step of a record, and for the
    outcome of the step."""
    numbers = read_record(record)
    _, frozen = split_params(state.params, config.frozen)
    frozen_layers = sorted({path.rpartition("/")[0] or path for path in flatten_by_path(frozen)})
    texts = []
    for feature in config.features:
        name = feature.name.replace("_", " ")
        columns = [f"{column} {numbers[column]:g}" for column in feature.columns]
        if isinstance(feature, Freezing):
            columns = [join_first(frozen_layers, SHOWN_FROZEN)] if frozen_layers else []
        elif isinstance(feature, ScaledLoss):
            scale = numbers["loss_scale"]
            columns = [] if scale == 1 else [f"{scale:g}"]
        if columns or not isinstance(feature, Freezing | ScaledLoss):
            texts.append(" ".join((name, ", ".join(columns))).strip())
    clip = recipe.train.clip.norm
    norm = numbers["grad_norm"]
    if clip is not None and norm > clip:
        texts.append(f"clip: the gradient is {norm / clip:.4g} times train.clip.norm = {clip:g}")
    outcome = record.classify_steps()
    if outcome.overflow[0]:
        texts.append("no update: the gradient overflows, and the loss scale falls")
    elif outcome.skipped_non_finite[0]:
        texts.append("no update: the step isn't finite")
    elif not outcome.should_continue[0]:
        texts.append("no update: the step isn't finite, and ended the run")
    return texts


def read_record(record: Telemetry) -> dict[str, float]:
    """Return the columns of the only step of a record."""
    return {name: float(column[0]) for name, column in record.columns.items()}


def format_layer_rows(rows: Sequence[StepLayer]) -> Iterator[str]:
    """Yield lines with the layers whose gradients are largest, in the order of the network."""
    head = ["layer", "gradient norm", "of squares", "weight norm", "rate"]
    largest = sorted(rows, key=lambda row: -np.nan_to_num(row.gradient_norm, nan=np.inf))
    largest_layers = {row.layer for row in largest[:SHOWN_LAYERS]}
    cells = [
        [
            row.layer,
            f"{row.gradient_norm:.5g}",
            f"{row.gradient_share:.2%}",
            f"{row.weight_norm:.5g}",
            f"{row.learning_rate:.4g}",
        ]
        for row in rows
        if row.layer in largest_layers
    ]
    yield from align_columns([head, *cells], right=range(1, len(head)))
    if len(rows) > SHOWN_LAYERS:
        yield f"... {len(rows) - SHOWN_LAYERS} more layers"


def format_sample_rows(rows: Sequence[SampleRow]) -> Iterator[str]:
    """Yield lines with the first samples of a ranking."""
    head = ["sample", "at", "label", "loss", "of loss", "of gradient", "loss without", "place"]
    cells = [
        [
            str(row.sample),
            str(row.position),
            row.label,
            _format_figure(row.loss, ".5g"),
            _format_figure(row.loss_share, ".1%"),
            _format_figure(row.gradient_share, ".1%"),
            _format_figure(row.other_loss, ".5g"),
            row.place if row.finite else f"{row.place} {NOT_FINITE}".strip(),
        ]
        for row in rows[:SHOWN_SAMPLES]
    ]
    yield from align_columns([head, *cells], right=(0, 1, 3, 4, 5, 6))
    if len(rows) > SHOWN_SAMPLES:
        yield f"... {len(rows) - SHOWN_SAMPLES} more samples; --json and --out have all"


def _format_figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


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
