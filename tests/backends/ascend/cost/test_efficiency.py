"""Multipliers move their groups, published steps lie in their intervals."""

from __future__ import annotations

import pytest

from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.cost.efficiency import GROUPS, calibrate_with
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.published.workloads import (
    Published,
    load_published_steps,
    trace_image_step,
)


def test_multiplier_speeds_up_only_its_group():
    ones = dict.fromkeys(GROUPS, 1.0)
    plain = calibrate_with(ones, 0.0).efficiency
    faster = calibrate_with({**ones, "depthwise": 2.0}, 0.0).efficiency
    for name in plain.classes:
        ratio = faster.classes[name].rate / plain.classes[name].rate
        assert ratio == pytest.approx(2.0 if name in GROUPS["depthwise"] else 1.0)


@pytest.mark.medium
def test_interval_holds_the_step_and_grows_with_the_spread():
    traced = trace_image_step("lenet5", 32, 32, 10)
    widths = []
    for log_sd in (0.1, 0.4):
        calibration = calibrate_with(dict.fromkeys(GROUPS, 1.0), 1.0, log_sd)
        report = Pricing(traced, chipset("ascend910"), calibration).price_modes(ExecutionConfig())
        low, high = report.table_interval_ms
        assert low < report.step_ms < high
        assert report.step_ms**2 == pytest.approx(low * high)
        widths.append(high / low)
    assert widths[1] > widths[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "ms"),
    [
        ("resnet50", 32, 17.91),
        ("alexnet", 32, 7.2),
        ("squeezenet1_0", 32, 16.7),
    ],
)
def test_published_steps_are_in_the_interval(model: str, batch: int, ms: float):
    row: Published = next(r for r in load_published_steps() if r.model == model and r.devices == 1)
    assert (row.batch, row.ms) == (batch, pytest.approx(ms, abs=0.01))
    traced = trace_image_step(row.model, row.batch, row.pixels, row.classes)
    low, high = (
        Pricing(traced, chipset("ascend910")).price_step(ExecutionConfig()).table_interval_ms
    )
    assert low < row.ms < high


@pytest.mark.slow
def test_resnet50_at_batch_256_fits_in_memory():
    report = Pricing(
        trace_image_step("resnet50", 256, 224, 1000), chipset("ascend910")
    ).price_modes(ExecutionConfig())
    assert report.memory.verdict == "fits"
