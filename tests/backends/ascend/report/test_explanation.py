"""Why a layer costs what it does: formulas, figures and their sources."""

from __future__ import annotations

import pytest

from pipeline.backends.ascend import price
from pipeline.backends.ascend.chip.options import OptionError
from tests.backends.ascend.dense_step import BATCH, WEIGHTS, step


def test_layer_is_explained_by_formulas_figures_and_sources() -> None:
    report = price(step, WEIGHTS, BATCH)
    found = report.explain("layer")
    assert sum(task.cost.us for task in found.tasks) == pytest.approx(found.us)
    assert any("16 x 16 x 16" in task.formula for task in found.tasks)
    numbers = {number.name: number for task in found.tasks for number in task.numbers}
    assert numbers["ai_cores_count"].value == 32
    assert "INI-A" in numbers["ai_cores_count"].source
    assert [each.name for each in found.interval_sources] == [
        "factor",
        "factor of graph mode",
        "spread from network to network",
        "spread of a network's steps",
        "scale of the interval",
        "fixed time of a graph's step, ms",
    ]
    text = str(found)
    assert text.startswith("MODELLED: layer takes")
    low, high = report.interval_ms
    assert f"ms if as tuned as the zoo, {low:,.2f} to {high:,.2f} as most repositories run" in text
    assert max(map(len, text.splitlines())) <= 100


def test_conversions_of_a_layer_are_listed_separately() -> None:
    found = price(step, WEIGHTS, BATCH).explain("layer")
    costs = [task.cost for task in found.tasks]
    inserted = [cost.task for cost in costs if cost.task.is_inserted]
    assert {task.type for task in inserted} >= {"TransData", "Cast"}
    others = {cost.task.type for cost in costs} - {task.type for task in inserted}
    assert others.isdisjoint({"TransData", "Cast"})
    assert f"the compiler inserted {len(inserted)} of them, which take " in str(found)
    assert "TransData (forward, inserted): " in str(found)


def test_unfitted_chip_is_a_source_of_the_interval() -> None:
    report = price(step, WEIGHTS, BATCH, hardware="atlas_a2")
    fitted = price(step, WEIGHTS, BATCH)
    names = [number.name for number in report.explain("layer").interval_sources]
    assert names[-1] == "spread from chip to chip"
    assert "wide, as the fit has no kernel and no step of this chip" in str(report)
    assert "no step of this chip" not in str(fitted)
    for name in ("interval_ms", "table_interval_ms"):
        spans = [getattr(each, name) for each in (report, fitted)]
        widths = [high / low for low, high in spans]
        assert widths[0] > 1.2 * widths[1]


def test_layers_of_any_cost_class_can_be_explained() -> None:
    report = price(step, WEIGHTS, BATCH, precision=None)
    assert all(str(report.explain(cost.layer)) for cost in report.layers)


def test_unknown_layer_is_reported_with_a_suggestion() -> None:
    with pytest.raises(OptionError, match="layer: there is no such layer; did you mean layer"):
        price(step, WEIGHTS, BATCH).explain("layers")
