"""Evaluation of a run's checkpoint, sample by sample, in the order of the evaluation split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import Array
from scipy.special import softmax

from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError
from pipeline.data.batch import Batch
from pipeline.data.dataset_spec import find_table_layout
from pipeline.data.inputs import Dataset
from pipeline.data.padding.buckets import SIZE, Padding
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops
from pipeline.stages.build import build_network
from pipeline.stages.data import drop_folds, load_data
from pipeline.stages.export.prediction import average_outputs, require_average
from pipeline.stages.record.trained_run import TrainedRun
from pipeline.training.bucketing import apply_in_bucket
from pipeline.training.contrastive import rank_partners

MAX_MISTAKES = 36
"""A report shows at most this many samples with wrong predictions."""
PIXEL_NDIM = 3
"""Number of axes of a batch of masks: samples, height and width."""
MAX_CONFUSED = 1000
"""Reports with at most this many classes have a confusion matrix."""
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows of one batch: sample numbers (n,), outputs float32 (n, ..., K), labels (n, ...)."""
RECALLS = (1, 5, 10, 50)
"""Numbers of nearest samples that may have the partner."""


@dataclass(frozen=True)
class ClassCounts:
    """Numbers of right predictions, of labels and of predictions by class, int64 (C,)."""

    hits: np.ndarray
    actual: np.ndarray
    predicted: np.ndarray
    confusion: np.ndarray | None
    """int64 (C, C) by true class (row) and predicted class; None above `MAX_CONFUSED` classes."""

    def ratios(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return precision, recall and F1 by class, float64 (C,); 0 if the denominator is 0."""
        denominators = self.predicted, self.actual, self.actual + self.predicted
        numerators = self.hits, self.hits, 2 * self.hits
        precision, recall, f1 = (
            np.divide(numerator, denominator, out=np.zeros(len(numerator)), where=denominator > 0)
            for numerator, denominator in zip(numerators, denominators, strict=True)
        )
        return precision, recall, f1

    @property
    def accuracy(self) -> float:
        """Share of labels with a correct prediction."""
        return int(self.hits.sum()) / max(1, int(self.actual.sum()))


@dataclass(frozen=True)
class ClassPredictions:
    """Predictions of samples with one class each, except ignored labels; arrays are (n,)."""

    samples: np.ndarray
    """Positions of the samples in the evaluation split."""
    labels: np.ndarray
    predicted: np.ndarray
    probability: np.ndarray
    """Probability of the predicted class."""
    label_probability: np.ndarray
    """Probability of the true class."""
    in_top5: np.ndarray
    counts: ClassCounts

    @property
    def wrong(self) -> np.ndarray:
        """Indices of the wrong predictions in these arrays, the least probable label first."""
        indices = np.flatnonzero(self.predicted != self.labels)
        order = np.lexsort((indices, -self.probability[indices], self.label_probability[indices]))
        return indices[order]


@dataclass(frozen=True)
class MaskSample:
    """An evaluation sample with the class of each pixel, true and predicted, int (H, W)."""

    index: int
    true: np.ndarray
    predicted: np.ndarray


@dataclass(frozen=True)
class PositionPredictions:
    """Predictions of samples with a class at each position, such as a pixel or a token."""

    right: np.ndarray
    """Share of correct predictions among each sample's valid positions, float64 (n,)."""
    counts: ClassCounts
    worst_masks: Sequence[MaskSample] = ()
    """The `MAX_MISTAKES` samples with the smallest shares, the smallest first; () unless the
    positions are pixels."""


@dataclass(frozen=True)
class NumberPredictions:
    """Predictions of numbers, both arrays (n, K), in the units of the data."""

    true: np.ndarray
    predicted: np.ndarray

    def figures(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return MAE, RMSE and R squared of each number, float64 (K,).

        R squared of a constant number is 0.
        """
        errors = self.predicted - self.true
        squared = np.square(errors).mean(axis=0)
        spread = self.true.var(axis=0)
        unexplained = np.divide(squared, spread, out=np.ones_like(squared), where=spread > 0)
        return np.abs(errors).mean(axis=0), np.sqrt(squared), 1 - unexplained


@dataclass(frozen=True)
class LabelPredictions:
    """Predictions of samples that may have several labels: bool and float64 arrays (n, K)."""

    true: np.ndarray
    probabilities: np.ndarray

    @property
    def predicted(self) -> np.ndarray:
        """Labels with a probability above 0.5, bool (n, K)."""
        return self.probabilities > 0.5

    @property
    def counts(self) -> ClassCounts:
        """Counts by label."""
        columns = self.true & self.predicted, self.true, self.predicted
        hits, actual, predicted = (part.sum(axis=0, dtype=np.int64) for part in columns)
        return ClassCounts(hits, actual, predicted, None)


@dataclass(frozen=True)
class MatchPredictions:
    """Ranks of the partners of pairs in the whole split; arrays are int64 (n,)."""

    ranks: np.ndarray
    """Rank of each pair's partner, from 1."""
    nearest: np.ndarray
    """The pair whose second text is nearest to the first text of each pair."""

    def compute_recalls(self) -> dict[int, float]:
        """Return the share of pairs whose partner is among the k nearest, by k of `RECALLS`."""
        return {k: float((self.ranks <= k).mean()) for k in RECALLS}


Predictions = (
    MatchPredictions | ClassPredictions | PositionPredictions | NumberPredictions | LabelPredictions
)


def evaluate_samples(run: TrainedRun, dataset: Dataset) -> Predictions:
    """Evaluate a run's weights on every sample of the evaluation split, as during training.

    The outputs of an ensemble are averaged. Raises DataError if the data has other targets than the
    run.
    """
    targets = dataset.targets
    if (targets.task, targets.names) != (run.samples.targets.task, run.samples.targets.names):
        raise DataError(
            f"the data has {targets}; must have {run.samples.targets}, on which the run was trained"
        )
    samples = run.samples
    fits = samples.table, samples.text, samples.scale, samples.targets.mean, samples.targets.std
    rates_hz = [data.audio and data.audio.rate_hz for data in (samples, dataset)]
    others = dataset.table, dataset.text, dataset.scale, targets.mean, targets.std
    if fits != others or len(set(rates_hz)) > 1:
        raise DataError(
            "the data has other columns, tokens, units or sample rates; must have those on which "
            "the run was trained"
        )
    if run.members:
        require_average(targets.task)
    batches = _average_members(run, dataset) if run.members else _evaluate_batches(run, dataset)
    if targets.task == "matching":
        outputs, _ = _concatenate_batches(batches)
        return MatchPredictions(*rank_partners(outputs))
    if targets.task == "regression":
        outputs, labels = _concatenate_batches(batches)
        true = targets.to_data_units(labels.reshape(len(labels), -1).astype(np.float64))
        return NumberPredictions(true, targets.to_data_units(outputs.astype(np.float64)))
    if targets.task == "multi_label":
        outputs, labels = _concatenate_batches(batches)
        probabilities = 0.5 * (1 + np.tanh(outputs.astype(np.float64) / 2))  # sigmoid
        return LabelPredictions(labels > 0.5, probabilities)
    if dataset.label_positions:
        return _predict_positions(batches, len(targets), run.recipe.dataset.ignore_index)
    return _predict_classes(batches, len(targets), run.recipe.dataset.ignore_index)


def open_members(run: TrainedRun, dataset: Dataset) -> list[tuple[TrainedRun, Dataset]]:
    """Return the members of an ensemble, each with the evaluation data that it reads.

    A member reads by its recipe, but in the ensemble's batches and with the ensemble's `eval`.
    """
    shared = _share_evaluation(run.recipe, run.recipe, dataset)
    opened = []
    for member in run.members:
        recipe = _share_evaluation(member.recipe, run.recipe, dataset)
        has_same_data = recipe.dataset == shared.dataset
        has_same_input = recipe.model.table_input == shared.model.table_input
        shares_data = has_same_data and has_same_input
        data = dataset if shares_data else load_data(recipe)
        opened.append((replace(member, recipe=recipe), data))
    return opened


def _share_evaluation(recipe: Recipe, ensemble: Recipe, dataset: Dataset) -> Recipe:
    """Return a recipe with the section `eval` of `ensemble`, and batches as in `dataset`."""
    recipe = drop_folds(recipe)
    size = {"batch_size": dataset.eval_order.batch_size}
    evaluated = recipe.dataset.eval.model_copy(update=size)
    section = recipe.dataset.model_copy(update={"eval": evaluated})
    return recipe.model_copy(update={"dataset": section, "eval": ensemble.eval})


def _average_members(run: TrainedRun, dataset: Dataset) -> Iterator[Rows]:
    """Yield the rows of an ensemble. Raises DataError if its members read other samples."""
    streams = [_evaluate_batches(member, data) for member, data in open_members(run, dataset)]
    for parts in zip_longest(*streams):
        # Sample numbers and labels must be equal.
        if None in parts or not all(
            np.array_equal(part[place], parts[0][place]) for part in parts for place in (0, 2)
        ):
            raise DataError(
                "the runs have other evaluation splits or labels; must be equal in an ensemble"
            )
        outputs = [outputs for _, outputs, _ in parts]
        rows, _, labels = parts[0]
        yield rows, np.asarray(average_outputs(outputs, run.samples.targets.task)), labels


def _evaluate_batches(run: TrainedRun, dataset: Dataset) -> Iterator[Rows]:
    order = dataset.eval_order
    compute = _compile_network(run.recipe, dataset)
    weights = jax.device_put(dict(run.arrays))
    seed = jnp.asarray(seed_words(run.recipe.seed))
    for step in range(order.steps_per_epoch):
        plan = order.batches(step, 1)
        rows = plan.indices[0]
        count = int(plan.counts[0])
        columns = {name: jnp.asarray(column[rows]) for name, column in dataset.eval.columns.items()}
        epoch = jnp.asarray(plan.epochs[0])
        batch = Batch(columns, seed, epoch, jnp.asarray(rows), jnp.asarray(plan.counts[0]))
        outputs, labels = compute(weights, batch)
        yield rows[:count], np.asarray(outputs)[:count], np.asarray(labels)[:count]


def _compile_network(
    recipe: Recipe, dataset: Dataset
) -> Callable[[Mapping[str, Array], Batch], tuple[Array, Array]]:
    """Compile a function from weights and a batch to outputs (B, ..., K) and labels (B, ...)."""
    network = build_network(recipe, dataset.targets, find_table_layout(dataset.eval_ops))
    padding = dataset.padding

    def compute_outputs(weights: Mapping[str, Array], batch: Batch) -> tuple[Array, Array]:
        columns = apply_ops(
            jnp, dataset.eval_ops, batch.columns, batch.seed, batch.epoch, batch.sample
        )
        sizes = batch.columns[SIZE] if padding.has_mask else None
        inputs = dataset.inputs.read(jnp, columns, sizes)
        variables = unflatten_dict(dict(weights), sep="/")
        result: Any = network.apply(variables, inputs, train=False)
        return result, columns["label"]

    @partial(jax.jit, static_argnums=0)
    def compute(
        padding: Padding, weights: Mapping[str, Array], batch: Batch
    ) -> tuple[Array, Array]:
        return apply_in_bucket(
            padding, batch, lambda cropped: compute_outputs(weights, cropped), is_random=False
        )

    if not padding.buckets:
        return partial(compute, padding)

    def compute_by_bucket(weights: Mapping[str, Array], batch: Batch) -> tuple[Array, Array]:
        # The host chooses the bucket, since labels of positions differ in shape between buckets.
        largest = np.asarray(batch.columns[SIZE]).max(axis=0)
        buckets = padding.buckets
        fitting = (bucket for bucket in buckets if (largest <= np.array(bucket)).all())
        one_bucket = replace(padding, buckets=(next(fitting, buckets[-1]),))
        return compute(one_bucket, weights, batch)

    return compute_by_bucket


def _predict_classes(
    batches: Iterator[Rows], classes: int, ignore_index: int | None
) -> ClassPredictions:
    parts = []
    for rows, outputs, labels in batches:
        outputs = outputs.astype(np.float64)
        true = labels.argmax(axis=-1) if labels.ndim == 2 else labels.astype(np.int64)
        if ignore_index is not None:
            valid = true != ignore_index
            rows, outputs, true = (array[valid] for array in (rows, outputs, true))
        with np.errstate(invalid="ignore"):  # the network may have diverged
            probabilities = softmax(outputs, axis=-1)
        places = np.arange(len(rows))
        predicted = outputs.argmax(axis=-1)
        # Of equal outputs, the earlier class ranks first, as in argmax.
        label_output = outputs[places, true][:, None]
        is_earlier = np.arange(outputs.shape[-1]) < true[:, None]
        rank = ((outputs > label_output) | ((outputs == label_output) & is_earlier)).sum(axis=-1)
        label_probability = probabilities[places, true]
        parts.append(
            (rows, true, predicted, probabilities[places, predicted], label_probability, rank < 5)
        )
    columns = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    # Samples come by bucket; this restores the order of the split.
    order = np.argsort(columns[0], kind="stable")
    rows, true, predicted, probability, label_probability, in_top5 = (
        column[order] for column in columns
    )
    if not len(rows):
        raise DataError(
            f"dataset.ignore_index = {ignore_index}: must not be every label of the evaluation"
        )
    counts = _count_classes(true, predicted, classes)
    return ClassPredictions(rows, true, predicted, probability, label_probability, in_top5, counts)


def _predict_positions(
    batches: Iterator[Rows], classes: int, ignore_index: int | None
) -> PositionPredictions:
    shares: list[tuple[np.ndarray, np.ndarray]] = []
    masks: list[tuple[float, MaskSample]] = []
    total: ClassCounts | None = None
    for rows, outputs, labels in batches:
        true = labels if labels.ndim < outputs.ndim else labels.argmax(axis=-1)
        valid = np.ones(true.shape, bool) if ignore_index is None else true != ignore_index
        predicted = outputs.argmax(axis=-1)
        axes = tuple(range(1, true.ndim))
        with np.errstate(invalid="ignore"):  # a sample without a valid label has no share
            right = ((predicted == true) & valid).sum(axis=axes) / valid.sum(axis=axes)
        shares.append((rows, right))
        if true.ndim == PIXEL_NDIM:
            masks += [
                (share, MaskSample(row, *planes))
                for row, share, *planes in zip(
                    rows.tolist(), right.tolist(), true, predicted, strict=True
                )
                if share < 1
            ]
            masks = sorted(masks, key=lambda mask: (mask[0], mask[1].index))[:MAX_MISTAKES]
        counts = _count_classes(true[valid].astype(np.int64), predicted[valid], classes)
        total = counts if total is None else _add_counts(total, counts)
    assert total is not None, "a split has samples"
    order = np.argsort(np.concatenate([rows for rows, _ in shares]), kind="stable")
    right = np.concatenate([share for _, share in shares])[order]
    return PositionPredictions(right, total, [mask for _, mask in masks])


def _count_classes(labels: np.ndarray, predicted: np.ndarray, classes: int) -> ClassCounts:
    columns = labels[labels == predicted], labels, predicted
    hits, actual, predictions = (np.bincount(column, minlength=classes) for column in columns)
    confusion = None
    if classes <= MAX_CONFUSED:
        cells = np.bincount(labels * classes + predicted, minlength=classes * classes)
        confusion = cells.reshape(classes, classes)
    return ClassCounts(hits, actual, predictions, confusion)


def _add_counts(first: ClassCounts, second: ClassCounts) -> ClassCounts:
    sums: dict[str, Any] = {}
    for name, counts in vars(first).items():
        sums[name] = None if counts is None else counts + getattr(second, name)
    return ClassCounts(**sums)


def _concatenate_batches(batches: Iterator[Rows]) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs and labels in the order of the split."""
    parts = list(batches)
    order = np.argsort(np.concatenate([rows for rows, _, _ in parts]), kind="stable")
    outputs = np.concatenate([outputs for _, outputs, _ in parts])
    labels = np.concatenate([labels for _, _, labels in parts])
    return outputs[order], labels[order]
