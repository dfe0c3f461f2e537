"""Metrics of probabilities, against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError
from pipeline.training.component_specs import MetricSpec
from pipeline.training.metrics import add_batch, add_metric_sums, summarize, zero_sums
from pipeline.training.target_metrics import BrierScore, CalibrationError
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]


def over_batches(metric: MetricSpec, logits: np.ndarray, labels: np.ndarray, batch: int) -> float:
    """The metric of samples in batches, the last one padded with what must not count."""
    sums = zero_sums(logits.shape[-1], (metric,))
    for start in range(0, len(logits), batch):
        part, answers = logits[start : start + batch], labels[start : start + batch]
        missing = batch - len(part)
        mask = np.arange(batch) < len(part)
        part = np.concatenate([part, np.full((missing, logits.shape[-1]), np.nan, np.float32)])
        answers = np.concatenate([answers, np.zeros((missing, *labels.shape[1:]), labels.dtype)])
        sums = add_metric_sums(
            sums, (metric,), jnp.asarray(part), jnp.asarray(answers), jnp.asarray(mask)
        )
    return float(metric.value(jax.tree.map(np.asarray, sums.component_sums[0])))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def expected_calibration_error(logits: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """Guo et al. 2017, eq. 3: bins are ((m - 1) / M, m / M]."""
    probability = softmax(logits).max(-1)
    right = logits.argmax(-1) == labels
    total = 0.0
    for number in range(bins):
        inside = (probability > number / bins) & (probability <= (number + 1) / bins)
        if inside.any():
            gap = abs(right[inside].mean() - probability[inside].mean())
            total += inside.mean() * gap
    return total


def samples(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    logits = (3 * draw.normal(size=(count, classes))).astype(np.float32)
    return logits, draw.integers(classes, size=count).astype(np.int32)


seeds = st.integers(0, 2**32 - 1)


@pytest.mark.medium
@pytest.mark.parametrize("bins", [1, 15])
@settings(deadline=None, max_examples=25)
@given(seeds)
def test_calibration_error_matches_the_paper(bins: int, seed: int) -> None:
    logits, labels = samples(21, 4, seed)
    value = over_batches(CalibrationError(bins=bins), logits, labels, 8)
    assert value == pytest.approx(expected_calibration_error(logits, labels, bins), abs=2e-6)


@pytest.mark.medium
@settings(deadline=None, max_examples=25)
@given(seeds)
def test_brier_score_is_the_mean_squared_distance(seed: int) -> None:
    logits, labels = samples(21, 4, seed)
    value = over_batches(BrierScore(), logits, labels, 8)
    distance = ((softmax(logits) - np.eye(4)[labels]) ** 2).sum(-1).mean()
    assert value == pytest.approx(distance, rel=1e-5)


@pytest.mark.medium
def test_brier_score_accepts_soft_labels() -> None:
    logits, _ = samples(21, 4, 1)
    labels = softmax(samples(21, 4, 2)[0]).astype(np.float32)
    value = over_batches(BrierScore(), logits, labels, 8)
    distance = ((softmax(logits) - labels) ** 2).sum(-1).mean()
    assert value == pytest.approx(distance, rel=1e-5)


@pytest.mark.medium
def test_fully_confident_predictions_are_in_the_last_bin() -> None:
    logits = np.tile(np.array([1000, 0, 0, 0], np.float32), (20, 1))
    labels = np.arange(20, dtype=np.int32) % 4
    assert over_batches(CalibrationError(), logits, labels, 8) == 0.75
    assert over_batches(BrierScore(), logits, labels, 8) == 1.5


@pytest.mark.parametrize("metric", [CalibrationError(), BrierScore()], ids=lambda m: m.name)
def test_samples_with_several_labels_are_refused(metric: MetricSpec) -> None:
    """Also where a batch is as large as a sample, whose shapes would fit."""
    logits, labels = jnp.zeros((4, 4, 3)), jnp.zeros((4, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"needs logits \(batch, classes\); these have shape"):
        add_metric_sums(zero_sums(3, (metric,)), (metric,), logits, labels, jnp.ones(4, bool))


@pytest.mark.slow
@pytest.mark.parametrize("metric", [CalibrationError(), BrierScore()], ids=lambda m: m.name)
def test_ignored_labels_do_not_count(metric: MetricSpec) -> None:
    """Of positions of samples, of which each label then is a sample."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(5, 4, 3)).astype(np.float32)
    labels = random.integers(0, 3, (5, 4)).astype(np.int32)
    where, mask = random.random((5, 4)) < 0.6, np.array([1, 1, 1, 1, 0], bool)
    odd = np.where(where, labels, -100)
    sums = add_metric_sums(
        zero_sums(3, (metric,)), (metric,), *map(jnp.asarray, (logits, odd, mask, where))
    )
    counted = where & mask[:, None]
    alone = metric.sums(logits[counted], labels[counted], np.ones(counted.sum(), bool))
    assert 0 < counted.sum() < 16
    np.testing.assert_allclose(sums.component_sums[0], alone, rtol=1e-5, atol=1e-6)


class Sums(MetricSpec):
    """Sums of another shape than those of none."""

    name: str = "sums"

    def zero(self, classes: int) -> Any:
        return {"a": np.zeros(classes)}

    def sums(self, logits: Any, labels: Any, mask: Any) -> Any:
        return {"a": logits.sum()}

    def value(self, sums: Any) -> float:
        return 1 / 0


def test_metric_sums_of_changed_shape_are_refused() -> None:
    metric = Sums()
    with pytest.raises(ValueError, match="sums: sums has shapes"):
        add_metric_sums(
            zero_sums(3, (metric,)), (metric,), jnp.zeros((2, 3)), jnp.zeros(2), jnp.ones(2, bool)
        )


@pytest.mark.medium
def test_failing_metric_is_named() -> None:
    metric = Sums()
    labels = jnp.zeros(2, jnp.int32)
    sums = zero_sums(3, (metric,))
    sums = add_batch(sums, jnp.zeros((2, 3)), labels, jnp.zeros(2), jnp.ones(2, bool))
    message = r"eval.metrics sums: value: ZeroDivisionError: division by zero"
    with pytest.raises(RunError, match=message):
        summarize(sums, ("a", "b", "c"), (metric,))


METRICS = "eval.metrics=[brier, {name: calibration_error, bins: 7}]"


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.slow
def test_sharded_metric_sums_do_not_depend_on_the_devices(tiny: Compose, tmp_path: Path) -> None:
    """Nor on the number of samples, which 4 does not divide."""
    on = ("model=mlp", "parallel.mode=data", "eval.every_steps=4", "train.steps=8", METRICS)
    for devices in (1, 4):
        run(tiny(*on, f"parallel.devices={devices}"), tmp_path / str(devices))
    outcome.assert_same_run(tmp_path / "1", tmp_path / "4")
    line = outcome.read_lines(tmp_path / "4" / "evals.jsonl")[-1]
    assert 0 < line["brier"] < 2
    assert 0 < line["calibration_error"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("eval.metrics=[brier, brier]", "eval.metrics: brier exists already"),
        ("eval.metrics=[no_such]", "there is no such metric"),
        ("checkpoint.best=brier", "there is no such metric"),
    ],
)
def test_invalid_metrics_are_refused(override: str, problem: str, tiny: Compose) -> None:
    with pytest.raises(RecipeError, match=problem):
        tiny("eval.every_steps=4", override)


@pytest.mark.slow
def test_best_checkpoint_can_follow_a_metric_component(tiny: Compose, tmp_path: Path) -> None:
    recipe = tiny(
        *("model=mlp", "train.steps=24", "eval.every_steps=4", METRICS),
        *("checkpoint.best=brier", "checkpoint.keep=1"),
    )
    run(recipe, tmp_path / "run")
    lines = outcome.read_lines(tmp_path / "run" / "evals.jsonl")
    values = {line["step"]: line["brier"] for line in lines}
    assert min(values, key=values.__getitem__) in outcome.checkpoints(tmp_path / "run")
