"""Metrics of numbers and of several labels against numpy's formulas, however batches are split."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.columns import Targets
from pipeline.training.metrics import add_batch, add_metric_sums, summarize, zero_sums
from pipeline.training.target_metrics import ExplainedShare, list_metrics

SAMPLES, OUTPUTS = 24, 3


def summary(outputs: np.ndarray, labels: np.ndarray, targets: Targets, batch: int) -> dict:
    """Evaluate in batches, the last padded by samples that do not count."""
    metrics = list_metrics(targets)
    sums = zero_sums(len(targets), metrics, has_classes=False)
    for start in range(0, len(outputs), batch):
        rows = np.arange(start, start + batch)
        mask, rows = jnp.asarray(rows < len(outputs)), np.minimum(rows, len(outputs) - 1)
        own = jnp.asarray(outputs[rows]), jnp.asarray(labels[rows])
        sums = add_batch(sums, *own, jnp.ones(batch), mask)
        sums = add_metric_sums(sums, metrics, *own, mask)
    return summarize(jax.tree.map(np.asarray, sums), targets.names, metrics)


@pytest.mark.medium
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([24, 7, 5]))
def test_errors_are_in_the_units_of_the_data(seed: int, batch: int) -> None:
    draw = np.random.default_rng(seed)
    mean, std = draw.normal(size=OUTPUTS) * 100, draw.uniform(0.5, 50, OUTPUTS)
    labels = draw.normal(size=(SAMPLES, OUTPUTS)).astype(np.float32)
    outputs = (labels + 0.3 * draw.normal(size=labels.shape)).astype(np.float32)
    targets = Targets(("a", "b", "c"), "regression", tuple(mean), tuple(std))

    found = summary(outputs, labels, targets, batch)

    true, predicted = (targets.to_data_units(values.astype(float)) for values in (labels, outputs))
    errors = predicted - true
    spread = np.square(true - true.mean(axis=0)).sum(axis=0)
    expected = {
        "mae": np.abs(errors).mean(),
        "rmse": np.sqrt(np.square(errors).mean(axis=0)).mean(),
        "r2": (1 - np.square(errors).sum(axis=0) / spread).mean(),
    }
    assert found.keys() == {"loss", "count", *expected}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.medium
def test_error_of_a_forecast_is_also_a_share_of_the_naive_one() -> None:
    ones = np.ones((4, 2), np.float32)
    targets = Targets(("a", "b"), "regression", (0.0, 5.0), (1.0, 3.0), naive_mae=8.0)
    found = summary(ones + 2, ones, targets, 4)
    assert found["mae"] == pytest.approx((2 * 1 + 2 * 3) / 2)
    assert found["relative_mae"] == pytest.approx(0.5)


@pytest.mark.medium
def test_r2_of_a_constant_target_is_zero() -> None:
    ones = np.ones((4, 1), np.float32)
    targets = Targets(("y",), "regression", (0.0,), (1.0,))
    assert summary(ones + 1, ones, targets, 4)["r2"] == 0
    # The sum of the squares of such a number is rounded to more than it is.
    metric, labels = ExplainedShare(), jnp.full((224, 1), 0.1)
    sums = metric.sums(labels + 1, labels, jnp.ones(224, bool))
    assert float(sums["squares"][0]) > float(sums["total"][0]) ** 2 / 224
    assert metric.value(sums) == 0
    # The squares of such numbers, added in float32, differ from the square of their sum.
    years = np.full((1000, 1), 1995.1, np.float32)
    assert summary(years + 1, years, replace(targets, mean=(), std=()), 8)["r2"] == 0


@pytest.mark.medium
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([24, 7, 5]))
def test_multi_label_metrics_match_a_loop(seed: int, batch: int) -> None:
    draw = np.random.default_rng(seed)
    outputs = draw.normal(size=(SAMPLES, OUTPUTS)).astype(np.float32)
    labels = draw.integers(2, size=outputs.shape).astype(np.float32)
    labels[:, 2] = 0

    found = summary(outputs, labels, Targets(("a", "b", "c"), "multi_label"), batch)

    pairs = list(zip(outputs > 0, labels > 0, strict=True))
    by_label = []
    for label in range(OUTPUTS):
        hits = sum(bool(p[label] and t[label]) for p, t in pairs)
        both = sum(int(p[label]) + int(t[label]) for p, t in pairs)
        by_label.append((hits, both))
    f1 = [2 * hits / both if both else 0 for hits, both in by_label]
    assert found["exact_match"] == sum(bool((p == t).all()) for p, t in pairs) / SAMPLES
    assert found["macro_f1"] == pytest.approx(sum(f1) / OUTPUTS)
    total = [sum(column) for column in zip(*by_label, strict=True)]
    assert found["micro_f1"] == pytest.approx(2 * total[0] / total[1])


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([24, 7]), st.sampled_from([None, 1]))
def test_token_metrics_match_a_loop(seed: int, batch: int, ignored: int | None) -> None:
    draw = np.random.default_rng(seed)
    logits = 3 * draw.normal(size=(SAMPLES, 5, OUTPUTS)).astype(np.float32)
    labels = draw.integers(0, OUTPUTS, (SAMPLES, 5)).astype(np.uint8)
    metrics = list_metrics(Targets(("a", "b", "c"), "next_token"), ignored)
    sums = zero_sums(OUTPUTS, metrics, has_classes=False)
    for start in range(0, SAMPLES, batch):
        rows = np.arange(start, start + batch)
        mask, rows = jnp.asarray(rows < SAMPLES), np.minimum(rows, SAMPLES - 1)
        sums = add_metric_sums(
            sums, metrics, jnp.asarray(logits[rows]), jnp.asarray(labels[rows]), mask
        )
    found = {
        metric.name: metric.value(jax.tree.map(np.asarray, own))
        for metric, own in zip(metrics, sums.component_sums, strict=True)
    }

    wide = logits.astype(np.float64)
    log_shares = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    valid = labels != ignored if ignored is not None else np.ones_like(labels, bool)
    of_label = np.take_along_axis(log_shares, labels[..., None].astype(int), axis=-1)[..., 0]
    assert found["perplexity"] == pytest.approx(np.exp(-of_label[valid].mean()), rel=1e-5)
    right = (wide.argmax(axis=-1) == labels)[valid].mean()
    assert found["token_accuracy"] == pytest.approx(right, rel=1e-6)


def test_overflowing_perplexity_is_infinite() -> None:
    _, perplexity = list_metrics(Targets(("a",), "next_token"))
    assert perplexity.value({"total": np.float32(8e5), "tokens": np.int32(1000)}) == np.inf
