"""Why a layer costs what it does: formulas, figures and their sources."""

from __future__ import annotations

import pytest

from pipeline.backends.ascend import price
from pipeline.backends.ascend.chip.options import OptionError
from tests.backends.ascend.dense_step import BATCH, WEIGHTS, step


def test_a_layer_is_explained_by_formulas_figures_and_their_sources() -> None:
    report = price(step, WEIGHTS, BATCH)
    found = report.explain("layer")
    assert sum(task.us for task in found.tasks) == pytest.approx(found.us)
    assert any("16 x 16 x 16" in task.formula for task in found.tasks)
    figures = {each.name: each for task in found.tasks for each in task.figures}
    assert figures["ai_cores_count"].value == 32
    assert "INI-A" in figures["ai_cores_count"].source
    assert [each.name for each in found.interval_sources] == [
        "spread of the classes",
        "spread of whole steps",
        "scale",
    ]
    text = str(found)
    assert text.startswith("MODELLED: layer takes")
    assert max(map(len, text.splitlines())) <= 100


def test_every_class_of_kernels_has_a_formula_of_figures_that_exist() -> None:
    report = price(step, WEIGHTS, BATCH, precision=None)
    assert all(str(report.explain(cost.layer)) for cost in report.layers)


def test_a_layer_that_is_not_there_is_named() -> None:
    with pytest.raises(OptionError, match="layer: there is no such layer; did you mean layer"):
        price(step, WEIGHTS, BATCH).explain("layers")
