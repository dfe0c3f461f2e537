"""Temperature scaling: probabilities of classes that are as often right as they say.

The logits are divided by one number T > 0, the one with the least cross-entropy on the evaluation
split (Guo et al. 2017, arXiv 1706.04599, sec. 4.2). It doesn't change which class is predicted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.config.recipe import Recipe, RunFeatureSpec
from pipeline.core.registry import component
from pipeline.stages.runner.run_feature import RunFeature

if TYPE_CHECKING:
    from pipeline.stages.runner.context import CompiledRun
    from pipeline.training.state import TrainState

CHUNK_SAMPLES = 256
BINS = 15
FEWEST_SAMPLES = 20
"""The fewest samples that a temperature is fitted to."""
LIMITS = (1 / 20, 20.0)
"""Least and greatest temperature."""


@component("run_feature")
class CalibrateSpec(RunFeatureSpec):
    """Fits the temperature of classes at the end, which `infer` and exports divide logits by."""

    name: Literal["calibrate"] = "calibrate"

    def open(self, recipe: Recipe) -> RunFeature:
        """Return the feature. Raises ValueError for a run that evaluates nothing."""
        if "eval" not in recipe.stages:
            raise ValueError("fits a temperature to the evaluation split; stages must have eval")
        return TemperatureScaling(recipe)


class TemperatureScaling(RunFeature):
    """The temperature of a run, in its summary, and the calibration error without and with it."""

    def conclude(self, run: CompiledRun, state: TrainState) -> None:
        """Fit the temperature if the run predicts one class of a sample."""
        from pipeline.training.parallel.state_sharing import gather_arrays

        dataset = run.dataset
        state = gather_arrays(state)
        if dataset.targets.task != "classification" or dataset.label_positions:
            return
        logits, labels = compute_logits(run, state)
        if not run.context.ranks.is_first:
            return
        report = run.context.reporter.print_stage
        if len(labels) < FEWEST_SAMPLES:
            samples = f"{len(labels)} evaluation samples are fewer than {FEWEST_SAMPLES}"
            report("calibrate", f"{samples}; probabilities stay as they are")
            return
        temperature = fit_temperature(logits, labels)
        before = compute_calibration_error(logits, labels)
        after = compute_held_out_error(logits, labels)
        run.context.summary.calibration = {
            "temperature": temperature,
            "error_before": before,
            "error_held_out": after,
            "samples": len(labels),
        }
        report(
            "calibrate",
            f"temperature {temperature:.3f}; calibration error {before:.4f}, with temperatures of "
            f"the other half {after:.4f}, over {len(labels):,} samples",
        )


def compute_logits(run: CompiledRun, state: TrainState) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits (n, C), float64, and the classes (n,) of the evaluation samples whose label
    isn't `dataset.ignore_index`."""
    import jax

    from pipeline.data.batch import read_chunks
    from pipeline.training.step import get_evaluated_weights, predict

    config = run.built.step_config
    split = run.dataset.eval
    variables = get_evaluated_weights(config, state)
    compute = jax.jit(partial(predict, config))
    results: list[tuple[Any, Any]] = []
    rows = np.arange(len(split))
    size = min(CHUNK_SAMPLES, len(split))
    for batch, num_new in read_chunks(split, rows, run.context.recipe.seed, size):
        logits, labels = compute(variables, batch)
        results.append((np.asarray(logits)[:num_new], np.asarray(labels)[:num_new]))
    logits, labels = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
    classes = labels.argmax(axis=-1) if labels.ndim == 2 else labels
    is_counted = classes != run.context.recipe.dataset.ignore_index  # all for None
    return logits[is_counted].astype(np.float64), classes[is_counted]


def fit_temperature(logits: np.ndarray, labels: np.ndarray, *, prior: bool = True) -> float:
    """Return the temperature within `LIMITS` with the least mean cross-entropy of logits (n, C) and
    classes (n,). The cross-entropy is convex in 1 / T.

    With a `prior` the true class has the share (n + 1) / (n + C), and each other 1 / (n + C) (Platt
    1999, sec. 2.2). So a few samples that are all right don't lead to certainty.
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    rows = np.arange(len(labels))
    count, classes = logits.shape
    smoothing = classes / (count + classes) if prior else 0.0

    def compute_loss(log_temperature: float) -> float:
        shares = log_softmax(logits * np.exp(-log_temperature), axis=1)
        true = shares[rows, labels].mean()
        return float(-(1 - smoothing) * true - smoothing * shares.mean())

    bounds = tuple(np.log(LIMITS))
    result = minimize_scalar(compute_loss, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    return float(np.exp(result.x))


def compute_calibration_error(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the expected calibration error of logits (n, C) and classes (n,), as the metric
    `calibration_error` does, in 15 bins."""
    from scipy.special import log_softmax

    shares = np.exp(log_softmax(logits, axis=1))
    confidence = shares.max(axis=1)
    is_right = logits.argmax(axis=1) == labels
    bins = np.clip(np.ceil(confidence * BINS) - 1, 0, BINS - 1).astype(int)
    differences = np.bincount(bins, is_right - confidence, BINS)
    return float(np.abs(differences).sum() / len(labels))


def compute_held_out_error(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the calibration error of each half of the samples with the temperature of the other
    half, every other sample. So no sample has a temperature that it was fitted to."""
    scaled = np.empty_like(logits)
    for part in (0, 1):
        scaled[part::2] = logits[part::2] / fit_temperature(
            logits[1 - part :: 2], labels[1 - part :: 2]
        )
    return compute_calibration_error(scaled, labels)
