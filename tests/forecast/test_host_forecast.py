"""Forecasts of a step here: parts that add up, peaks that are rates, and refused flags."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import jax
import pytest

from pipeline.config.compose import compose_and_check
from pipeline.forecast.host_forecast import HostForecast, checked, forecast_step
from pipeline.forecast.host_peaks import CACHED_BYTES, HostPeaks, measure_host_peaks
from pipeline.observe.reporter import Reporter
from pipeline.stages.build import build
from pipeline.stages.data import load_data
from pipeline.stages.estimate import propose
from pipeline.stages.lowering_problems import count_problems

ROLES = ("forward", "images_gradient", "kernel_gradient")
PEAKS = HostPeaks(
    {(kind, role): 1e9 for kind in ("conv2d", "dense") for role in ROLES}, 1e9, 4e9, 2.0, 50.0
)


def forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> HostForecast:
    monkeypatch.setattr(
        "pipeline.forecast.host_forecast.measure_host_peaks", lambda device, dtype: PEAKS
    )
    recipe = compose_and_check(["+recipe=lenet5_digits", *overrides])
    backend = recipe.device.open(recipe.parallel)
    with Reporter() as reporter:
        dataset = load_data(recipe, reporter)
        built = build(recipe, dataset, reporter)
    proposal = propose(recipe, dataset, built)
    return forecast_step(proposal, built, backend, recipe.train.precision, tmp_path)


def test_a_forecast_is_the_sum_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (
        forecast(tmp_path, monkeypatch, f"train.batch_size={size}") for size in (48, 96)
    )
    assert small.step_ms == pytest.approx(small.products_ms + small.rest_ms + small.overhead_ms)
    assert large.products_ms == pytest.approx(2 * small.products_ms, rel=0.05)
    assert large.overhead_ms == small.overhead_ms
    assert small.problems == 18
    assert str(small).startswith("FORECAST, not measured: lenet5_digits on ")


def test_every_computation_of_a_step_is_counted() -> None:
    recipe = compose_and_check(["+recipe=resnet20_cifar10", "dataset=digits"])
    with Reporter() as reporter:
        dataset = load_data(recipe, reporter)
        built = build(recipe, dataset, reporter)
    counted = count_problems(built.parts, built.state, 32)
    roles: Counter[str] = Counter()
    for problem, count in counted.items():
        if problem.kind == "conv2d":
            roles[problem.role] += count
    assert roles["forward"] == roles["kernel_gradient"]
    assert roles["images_gradient"] == roles["forward"] - 1
    assert max(counted.values()) >= 5


def test_small_kernels_move_their_bytes_in_a_cache() -> None:
    assert PEAKS.stream_us(4e9 * 1e-6) == pytest.approx(1.0)
    assert PEAKS.stream_us(CACHED_BYTES) == pytest.approx(1e6 * CACHED_BYTES / 1e9)


def test_a_check_says_how_far_off_and_which_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = forecast(tmp_path, monkeypatch)
    assert checked(found, found.step_ms / 1.25).endswith("the forecast is 25% too long")
    assert checked(found, found.step_ms / 0.8).endswith("the forecast is 20% too short")


@pytest.mark.slow
def test_peaks_are_rates_of_this_machine() -> None:
    peaks = measure_host_peaks(jax.devices("cpu")[0], "float32")
    assert min(peaks.flops.values()) > 1e7
    assert min(peaks.bytes_per_s, peaks.cached_bytes_per_s, peaks.op_us, peaks.dispatch_us) > 0
