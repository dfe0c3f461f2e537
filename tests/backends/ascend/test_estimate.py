"""Recommendations: every change is priced as it says, in order, one of a kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.cost.collectives import form_buckets
from pipeline.backends.ascend.estimate import Recommendation, advise, list_split_points
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.published.workloads import trace_image_step
from pipeline.core.files.knowledge_bank import read_bank

SMALL = ExecutionConfig(sink_size=10)


def lenet(batch: int) -> Pricing:
    return Pricing(trace_image_step("lenet5", batch, 32, 10), chipset("ascend910"))


@pytest.fixture(scope="module")
def pricing() -> Pricing:
    return lenet(32)


def by_kind(changes: tuple[Recommendation, ...]) -> dict[str, Recommendation]:
    assert len({change.kind for change in changes}) == len(changes)
    return {change.kind: change for change in changes}


@pytest.mark.slow
def test_changes_are_sorted_by_gain_and_one_per_kind(pricing: Pricing) -> None:
    asked = replace(SMALL, precision="O0", mode="op_by_op", host_workers=1)
    changes = advise(pricing, asked, lenet)
    assert set(by_kind(changes)) == {"batch", "precision", "sink", "workers", "auto_tune"}
    assert all(one.gain >= other.gain for one, other in pairwise(changes))


@pytest.mark.medium
def test_tuning_advice_does_not_change_bank_entries(pricing: Pricing, tmp_path: Path) -> None:
    bank = tmp_path / "bank.json"
    config = replace(SMALL, tune_bank=str(bank))
    pricing.price_step(config)
    before = read_bank(bank, dict)
    changes = by_kind(advise(pricing, config))
    assert changes["auto_tune"].gain > 0
    after = read_bank(bank, dict)
    assert before
    assert {key: after[key] for key in before} == before


CASES: dict[str, tuple[ExecutionConfig, dict[str, Any], str]] = {
    "sink": (SMALL, {"sink_size": 1000}, "train.sink=true train.sink_size=1000"),
    "precision": (replace(SMALL, precision=None), {"precision": "O2"}, "device.precision=O2"),
    "auto_tune": (SMALL, {"auto_tune": "exhaustive"}, "device.auto_tune=exhaustive"),
    "workers": (
        replace(SMALL, host_workers=1),
        {"host_workers": 4},
        "device.host_workers=4",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_gain_matches_the_price_of_the_changed_options(kind: str, pricing: Pricing) -> None:
    question, fields, override = CASES[kind]
    change = by_kind(advise(pricing, question))[kind]
    before, after = pricing.price_modes(question), pricing.price_modes(replace(question, **fields))
    assert change.override == override
    assert change.step_ms == pytest.approx(after.step_ms)
    assert change.samples_per_s == pytest.approx(after.samples_per_s)
    assert change.gain == pytest.approx(after.samples_per_s / before.samples_per_s - 1)


@pytest.mark.medium
def test_larger_batch_is_traced_again(pricing: Pricing) -> None:
    tried: list[int] = []

    def retrace(batch: int) -> Pricing:
        tried.append(batch)
        return lenet(batch)

    change = by_kind(advise(pricing, SMALL, retrace))["batch"]
    assert tried == [64]
    assert change.override == "train.batch_size=64"
    assert change.samples_per_s == pytest.approx(lenet(64).price_modes(SMALL).samples_per_s)
    assert "batch" not in by_kind(advise(pricing, SMALL))


@pytest.mark.medium
@pytest.mark.parametrize(
    "figures",
    [{"hbm_gib": 1e-3, "feature_map_memory_gib": 1e-3}, {"data_queue_gib": 150e3 / 2**30}],
    ids=["memory", "queue"],
)
def test_batch_beyond_device_memory_is_not_advised(
    figures: dict[str, float], pricing: Pricing
) -> None:
    """32 images of 32 x 32 floats are 131 kB, 64 of them 262 kB."""
    small = pricing.with_figures(**figures)
    kinds = by_kind(advise(small, SMALL, lambda batch: lenet(batch).with_figures(**figures)))
    assert "batch" not in kinds
    assert "auto_tune" in kinds


def test_settings_in_use_are_not_advised(pricing: Pricing) -> None:
    best = ExecutionConfig(precision="O3", sink_size=1000, auto_tune="exhaustive")
    assert advise(pricing, best) == ()


def test_sink_is_advised_for_op_by_op(pricing: Pricing) -> None:
    change = by_kind(advise(pricing, replace(SMALL, mode="op_by_op")))["sink"]
    assert change.override == "train.sink=true train.sink_size=1000 device.mode=loop_sink"
    assert change.gain > 1
    assert change.distinguishable


def test_buckets_are_advised_only_for_several_devices(pricing: Pricing) -> None:
    assert "buckets" not in by_kind(advise(pricing, SMALL))
    many = replace(SMALL, devices=8)
    change = by_kind(advise(pricing, many))["buckets"]
    points = tuple(map(int, change.override.partition("=")[2].strip("[]").split(",")))
    other = pricing.price_modes(replace(many, fusion=points))
    assert change.step_ms == pytest.approx(other.step_ms)


def test_gain_below_one_percent_is_not_distinguishable() -> None:
    small, large = (
        Recommendation("sink", "longer", "train.sink_size=9", 1, 1, g) for g in (0.009, 0.02)
    )
    assert str(small) == "train.sink_size=9: longer, not distinguishable"
    assert str(large) == "train.sink_size=9: longer, +2.0%"


@pytest.mark.slow
@given(st.lists(st.integers(1, 10**6), max_size=60))
def test_split_points_are_a_valid_fusion(sizes: list[int]) -> None:
    found = list_split_points(sizes)
    assert len(set(found)) == len(found)
    for points in found:
        buckets = form_buckets(points, [0] * len(sizes))
        assert len(buckets) == len(points) + 1
        assert sum(map(len, buckets)) == len(sizes)


def test_equal_parameters_are_split_in_equal_parts() -> None:
    assert list_split_points([8] * 12)[:3] == ((5,), (3, 7), (2, 5, 8))
