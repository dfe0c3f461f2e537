"""Callbacks of recipes, told of evaluations by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.engine.callbacks.callback import Callback, Evaluation, RunControl
from pipeline.engine.callbacks.metric_callbacks import ReduceOnPlateau, StopAt
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]


@dataclass
class Asked:
    """What a callback asks of a run."""

    learning_rate: float = 1.0
    stops: list[str] = field(default_factory=list)

    def scale_learning_rate(self, factor: float) -> None:
        self.learning_rate *= factor

    def stop(self, reason: str) -> None:
        self.stops.append(reason)


def rates(callback: Callback, values: Sequence[float], metric: str = "loss") -> list[float]:
    """The learning rate after each evaluation."""
    asked, found = Asked(), []
    for step, value in enumerate(values):
        evaluation = Evaluation({metric: value, "count": 1}, None)
        callback.on_eval(cast(RunControl, asked), step, evaluation)
        found.append(asked.learning_rate)
    return found


def test_plateau_reduces_the_rate_after_each_patience() -> None:
    callback = ReduceOnPlateau(factor=0.5, patience=2).build()
    losses = [3.0, 2.0, 2.0, 2.5, 2.0, 2.0, 1.0, 1.0]
    assert rates(callback, losses) == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_improvement_must_exceed_min_delta() -> None:
    callback = ReduceOnPlateau(factor=0.5, patience=1, min_delta=0.25, metric="accuracy").build()
    assert rates(callback, [0.25, 0.5, 0.75, 1.125], "accuracy") == [1, 0.5, 0.5, 0.5]


def test_rate_is_not_reduced_below_min_rate() -> None:
    callback = ReduceOnPlateau(factor=0.25, patience=1, min_rate=0.5).build()
    assert rates(callback, [1.0, 1.0, 1.0, 1.0]) == [1, 0.5, 0.5, 0.5]


def test_non_finite_metric_is_not_the_best_value() -> None:
    callback = ReduceOnPlateau(factor=0.5, patience=1).build()
    assert rates(callback, [math.nan, 1.0, 0.5, math.nan]) == [0.5, 0.5, 0.5, 0.25]
    assert callback.state() == [-0.5, 0]
    fresh = ReduceOnPlateau().build()
    rates(fresh, [math.nan])
    assert fresh.state() == [None, 1]


@pytest.mark.medium
@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), max_size=12), st.integers(0, 12))
def test_plateau_count_continues_after_a_resume(values: list[float], middle: int) -> None:
    spec = ReduceOnPlateau(factor=0.5, patience=2)
    whole, first, second = spec.build(), spec.build(), spec.build()
    expected = rates(whole, values)
    before = rates(first, values[:middle])
    second.restore(first.state())
    reduced = before[-1] if before else 1.0
    assert [*before, *(reduced * rate for rate in rates(second, values[middle:]))] == expected


@pytest.mark.parametrize("state", [3, [], ["x", 1], [1.0, 2.5], {"best": 1}], ids=str)
def test_state_of_another_callback_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="must be a value and a number of evaluations"):
        ReduceOnPlateau().build().restore(state)


@pytest.mark.parametrize(
    ("metric", "values", "step"), [("loss", [2.0, 1.0, 0.5], 1), ("accuracy", [0.5, 0.9, 1.0], 2)]
)
def test_stop_at_ends_the_run_at_its_value(metric: str, values: list[float], step: int) -> None:
    callback, asked = StopAt(metric=metric, value=1.0).build(), Asked()
    for number, value in enumerate(values):
        assert bool(asked.stops) == (number > step)
        evaluation = Evaluation({metric: value, "count": 1}, None)
        callback.on_eval(cast(RunControl, asked), number, evaluation)
    assert asked.stops[0] == f"{metric} is 1"


def test_stop_at_ignores_non_finite_metrics() -> None:
    callback, asked = StopAt(metric="loss", value=1.0).build(), Asked()
    callback.on_eval(cast(RunControl, asked), 1, Evaluation({"loss": math.nan}, None))
    assert asked.stops == []


@pytest.mark.slow
def test_unknown_metric_is_refused_before_training(tiny: Compose) -> None:
    with pytest.raises(RecipeError, match=r"train\.callbacks\.0\.metric = brier: .*eval\.metrics"):
        tiny("eval.every_steps=8", "train.callbacks=[{name: stop_at, metric: brier, value: 1.0}]")
    with pytest.raises(RecipeError, match=r"train\.callbacks\.0\.metric = loss: needs eval"):
        tiny("eval.every_epochs=null", "train.callbacks=[reduce_on_plateau]")


PLATEAU = "{name: reduce_on_plateau, patience: 1, min_delta: 100.0, factor: 0.5}"
STOP_AT = "{name: stop_at, metric: calibration_error, value: 1.0}"


@pytest.mark.slow
def test_callbacks_are_configured_by_the_recipe(tiny: Compose, tmp_path: Path) -> None:
    length = "model=mlp", "train.steps=24", "train.sink_size=8", "eval.every_steps=4"
    metrics = "eval.metrics=[calibration_error]"
    recipe = tiny(*length, metrics, f"train.callbacks=[{PLATEAU},{STOP_AT}]")
    summary = run(recipe, tmp_path / "run")
    assert (summary.status, summary.steps) == ("done", 4)
    assert summary.reason is not None
    assert summary.reason.startswith("a callback stopped it: calibration_error is 0.")
    run(tiny(*length, f"train.callbacks=[{PLATEAU}]"), tmp_path / "reduced")
    found = [line["learning_rate"] for line in outcome.metrics(tmp_path / "reduced")]
    assert found[3::4] == pytest.approx([0.01, 0.01, 0.005, 0.0025, 0.00125, 0.000625])
