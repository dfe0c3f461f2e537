"""The fit recovers its data's parameters, bounds are one-sided, and the trace's step is met."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ascend_fit.calibrate import (
    Parts,
    calibration_at,
    fit,
    left_out_errors,
    quantile,
    spread_of,
)
from benchmarks.ascend_fit.validate_trace import (
    alexnet_step,
    compare_classes,
    compare_step,
    lines,
)
from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.cost.calibration import GROUPS, calibrate_with, load_calibration
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.published.workloads import (
    SPECIAL,
    Published,
    image_step,
    model_spec,
    published_steps,
)
from pipeline.backends.ascend.validate import kendall_tau
from pipeline.core.errors import RunError

ROW = published_steps()[0]


def part(
    groups: list[float], ms: float, family: str, quality: str = "device", tasks: float = 0.1
) -> Parts:
    row = replace(ROW, id=family, family=family, ms=ms, quality=quality)
    return Parts(row, np.array(groups), tasks, 1.0, 0.1)


def rows_from(truth: np.ndarray, count: int = 12) -> list[Parts]:
    """Rows whose published times follow exactly from the parameters, each group slow in some."""
    parts = []
    for index in range(count):
        groups = [1.0] * len(GROUPS)
        groups[index % len(GROUPS)] = 40.0
        draft = part(groups, 1.0, f"family{index}", tasks=0.2 + 0.3 * (index % 3))
        ms = draft.step_ms(truth)
        parts.append(replace(draft, row=replace(draft.row, ms=ms)))
    return parts


def test_fit_moves_from_the_priors_towards_the_parameters_of_the_rows():
    truth = np.append(np.full(len(GROUPS), 0.1), 1.0)
    found = fit(rows_from(truth, 200))
    assert np.all((found[:-1] > 0.05) & (found[:-1] < 0.1))


def test_rows_that_the_priors_explain_leave_them_alone():
    truth = np.append(np.zeros(len(GROUPS)), 1.0)
    assert fit(rows_from(truth)) == pytest.approx(truth, abs=1e-6)


def test_a_bound_that_is_kept_says_nothing():
    rows = rows_from(np.append(np.zeros(len(GROUPS)), 1.0))
    bound = part([10.0] * len(GROUPS), 1e6, "bounded", "at_most")
    assert fit([*rows, bound]) == pytest.approx(fit(rows))


def test_a_bound_that_is_broken_speeds_the_model_up():
    rows = rows_from(np.append(np.zeros(len(GROUPS)), 1.0))
    bounds = [part([10.0] * len(GROUPS), 20.0, f"b{i}", "at_most") for i in range(50)]
    assert np.all(fit([*rows, *bounds])[:-1] > 0.01)


def test_left_out_errors_are_zero_where_every_family_agrees():
    rows = rows_from(np.append(np.zeros(len(GROUPS)), 1.0))
    assert left_out_errors(rows) == pytest.approx(np.zeros(len(rows)), abs=1e-6)


@pytest.mark.slow
def test_spread_makes_four_fifths_of_the_rows_lie_inside():
    rows = [
        part([10.0] * len(GROUPS), 41.1 * factor, f"f{factor}")
        for factor in np.linspace(0.7, 1.4, 15)
    ]
    log_sd, scale = spread_of(rows)
    errors = np.abs(left_out_errors(rows))
    half_width = 1.2816 * scale * np.hypot(0.1, log_sd)
    assert np.mean(errors <= half_width + 1e-12) == pytest.approx(0.8)


def test_weighted_quantile_by_hand():
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0])
    assert quantile(values, weights, 0.5) == 2.0
    assert quantile(values, weights, 0.2) == 1.0
    assert quantile(values, weights, 1.0) == 3.0


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=12))
def test_kendall_tau_against_counted_pairs(points):
    signs = [np.sign(a[0] - b[0]) * np.sign(a[1] - b[1]) for a, b in combinations(points, 2)]
    untied = [sign for sign in signs if sign]
    found = kendall_tau([x for x, _ in points], [y for _, y in points])
    if untied:
        assert found == pytest.approx(sum(untied) / len(untied))
    else:
        assert math.isnan(found)


def test_a_multiplier_speeds_up_its_group_alone():
    ones = dict.fromkeys(GROUPS, 1.0)
    plain = calibrate_with(ones, 0.0).efficiency
    faster = calibrate_with({**ones, "depthwise": 2.0}, 0.0).efficiency
    for name in plain.classes:
        ratio = faster.rate(name) / plain.rate(name)
        assert ratio == pytest.approx(2.0 if name in GROUPS["depthwise"] else 1.0)


def test_calibration_files_that_are_none_are_refused(tmp_path: Path):
    file = tmp_path / "calibration.yaml"
    file.write_text("multipliers: {products: 1.0}\n")
    with pytest.raises(RunError, match="not a calibration"):
        load_calibration(file)


@pytest.mark.slow
def test_every_published_row_names_a_network_that_there_is():
    for row in published_steps():
        if row.model not in SPECIAL:
            assert model_spec(row.model).name
    assert len({row.id for row in published_steps()}) == len(published_steps())


def test_interval_holds_the_step_and_grows_with_the_spread():
    traced = image_step("lenet5", 32, 32, 10)
    widths = []
    for log_sd in (0.1, 0.4):
        calibration = calibration_at(np.append(np.zeros(len(GROUPS)), 1.0), log_sd)
        report = Pricing(traced, chipset("ascend910"), calibration).report(ExecutionConfig())
        low, high = report.interval_ms
        assert low < report.step_ms < high
        assert report.step_ms**2 == pytest.approx(low * high)
        widths.append(high / low)
    assert widths[1] > widths[0]


@pytest.mark.slow
def test_alexnet_is_as_its_trace():
    """The goals: the step within 15 %, phases 25 %, classes of kernels 35 % in the median."""
    report = alexnet_step(load_calibration())
    step, *phases = compare_step(report)
    assert abs(step.ratio - 1) < 0.15
    assert all(abs(phase.ratio - 1) < 0.25 for phase in phases)
    classes = compare_classes(report)
    assert median(abs(one.ratio - 1) for one in classes) < 0.35
    assert sum(one.published for one in classes) == pytest.approx(5848 - 317, abs=5)
    assert len(list(lines(report))) == 2 + len(classes) + len(phases) + 1


SQUEEZENET_IS_TOO_FAST = pytest.mark.xfail(
    strict=True, reason="modelled 12.08 ms, 8.83 to 16.54: the published 16.7 is 1 % above"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "ms"),
    [
        ("resnet50", 32, 17.91),
        ("alexnet", 32, 7.2),
        pytest.param("squeezenet1_0", 32, 16.7, marks=SQUEEZENET_IS_TOO_FAST),
    ],
)
def test_published_steps_lie_in_the_interval(model: str, batch: int, ms: float):
    row: Published = next(r for r in published_steps() if r.model == model and r.devices == 1)
    assert (row.batch, row.ms) == (batch, pytest.approx(ms, abs=0.01))
    traced = image_step(row.model, row.batch, row.pixels, row.classes)
    low, high = Pricing(traced, chipset("ascend910")).report(ExecutionConfig()).interval_ms
    assert low < row.ms < high


@pytest.mark.slow
def test_resnet50_at_batch_256_fits():
    report = Pricing(image_step("resnet50", 256, 224, 1000), chipset("ascend910")).report(
        ExecutionConfig()
    )
    assert report.memory.verdict == "fits"
