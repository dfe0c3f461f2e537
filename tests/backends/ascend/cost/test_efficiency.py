"""Multipliers move their groups, published steps lie in their intervals.

The interval of a population, by hand, and the package's fit.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.cost.efficiency import (
    GROUPS,
    Population,
    calibrate_with,
    load_populations,
)
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.published.scores import load_classes
from pipeline.backends.ascend.published.workloads import (
    DESCRIBED,
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


def test_fixed_time_and_scale_of_a_population_match_hand_calculation() -> None:
    population = Population(2.0, 1.5, 1.0, 0.1, 0.3, 0.4, 5, 2, interval_scale=0.5, fixed_ms=10)
    low, high = population.interval_ms(20, eager=False)
    assert math.sqrt(low * high) == pytest.approx((20 + 10) * 2 * 1.5)
    assert math.log(high / low) == pytest.approx(2 * 1.2816 * 0.5 * 0.5)
    assert population.centre_ms(20, eager=True) == 40
    expected_ms = population.expected_ms(20, eager=False)
    assert expected_ms == pytest.approx(90 * math.exp(-0.25))
    times = 90 * np.exp(0.5 * np.random.default_rng(0).normal(size=20_000))
    errors = [np.abs(ms / times - 1).mean() for ms in (expected_ms, 90, 0.8 * expected_ms)]
    assert errors[0] == min(errors)


def test_interval_matches_hand_calculation() -> None:
    population = Population(1.5, 0.9, 1.1, 0.1, 0.3, 0.4, 5, 2)
    # sqrt(0.3^2 + 0.4^2) = 0.5, and with 1.2 of another chip 1.3.
    for eager, centre in ((False, 13.5), (True, 16.5)):
        low, high = population.interval_ms(10, eager=eager)
        assert low == pytest.approx(centre / math.exp(0.5 * 1.2816))
        assert high == pytest.approx(centre * math.exp(0.5 * 1.2816))
    low, high = population.interval_ms(10, eager=False, chip_log_sd=1.2)
    assert math.log(high / low) == pytest.approx(2 * 1.3 * 1.2816)


def test_community_is_slower_and_wider_than_tuned_code() -> None:
    populations = load_populations()
    tuned, community = (populations.by_name[name] for name in ("tuned", "community"))
    assert community.factor > tuned.factor
    assert community.network_log_sd > tuned.network_log_sd
    assert populations.fits_tried >= 1


def test_populations_count_the_described_rows_of_the_part_fit() -> None:
    classes = load_classes()
    rows = [classes[row.id] for row in load_published_steps(DESCRIBED)]
    for name, population in load_populations().by_name.items():
        read = [row for row in rows if (row.part, row.population) == ("fit", name)]
        assert population.rows == len(read)
        assert population.networks == len({row.network for row in read})
