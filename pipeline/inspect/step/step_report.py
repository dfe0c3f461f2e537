"""Report of a step of a run: its record, features, gradients by layer, and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.core.errors import printable
from pipeline.core.files.value_text import align_columns, join_first
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.data.batch import Batch
from pipeline.data.columns import Split
from pipeline.data.row_views import find_place
from pipeline.data.targets import Targets
from pipeline.inspect.step.sample_terms import SampleShares
from pipeline.stages.sample_pictures import format_label
from pipeline.training.features.freezing import Freezing
from pipeline.training.features.loss_scales import ScaledLoss
from pipeline.training.state import TrainState, split_params
from pipeline.training.step_config import StepConfig
from pipeline.training.telemetry import Telemetry

SHOWN_SAMPLES = 20
SHOWN_LAYERS = 20
SHOWN_FROZEN = 5
LABELED = ("classification", "regression", "multi_label")
"""Tasks whose labels are shown."""
MAX_LABELS = 64
NOT_FINITE = "isn't finite"


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
