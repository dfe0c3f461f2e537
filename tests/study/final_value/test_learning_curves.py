from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.curve_families import FAMILIES, choose_side
from pipeline.core.errors import DataError
from pipeline.study.final_value.learning_curves import (
    EPSILON,
    Scale,
    choose_scale,
    list_recipe_runs,
    read_curve,
    read_own_curves,
    read_shipped_curves,
    thin,
    to_errors,
    to_values,
)


@pytest.mark.parametrize(
    ("metric", "values", "scale"),
    [
        ("accuracy", [0.0, 1.0], "share"),
        ("rmse", [50.0, 0.1], "cost"),
        ("r2", [-3.0, 0.5], "share"),
    ],
)
def test_scale_fits_the_metric_and_is_invertible(
    metric: str, values: list[float], scale: Scale
) -> None:
    assert choose_scale(metric, values) == scale
    errors = to_errors(values, scale)
    assert to_values(errors, scale) == pytest.approx(values)
    assert to_errors(0.9, "share") == pytest.approx(math.log(0.1 + EPSILON))
    assert to_errors([-1.0], "cost").tolist() == [pytest.approx(math.nan, nan_ok=True)]


def test_loss_that_is_negative_has_no_scale() -> None:
    with pytest.raises(DataError, match=r"^loss: has a value of -2, and an estimate"):
        choose_scale("loss", [1.0, -2.0])


def test_curve_is_thinned_to_40_points() -> None:
    """Of evaluations the last in a 40th counts, and of training losses the mean."""
    steps = list(range(1, 81))
    values = [float(step) for step in steps]
    shares, thinned = thin(steps, values, 80, "accuracy")
    assert shares.tolist() == (np.arange(1, 41) / 40).tolist()
    assert thinned.tolist() == values[1::2]
    assert thin(steps, values, 80, "train_loss")[1].tolist() == [1.5 + 2 * n for n in range(40)]
    assert thin([1, 2], [math.nan, 3.0], 80, "loss").tolist() == [[2 / 80], [3.0]]


def make_run(folder: Path, status: str = "done", recipe: str = "mine") -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("name: mine\n")
    summary = {"status": status, "steps": 20, "recipe": recipe, "metrics": {"accuracy": 0.75}}
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [{"step": step, "accuracy": step / 40} for step in (5, 10, 15, 20)]
    (folder / "evals.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_curve_of_a_run_ends_with_the_evaluation_after_training(tmp_path: Path) -> None:
    curve = read_curve(make_run(tmp_path / "a"), "accuracy", "a")
    assert curve is not None
    assert curve.shares.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert to_values(curve.errors, "share") == pytest.approx([0.125, 0.25, 0.375, 0.75])
    assert read_curve(tmp_path / "a", "f1", "a") is None


def test_runs_of_other_recipes_and_broken_ones_are_left_out(tmp_path: Path) -> None:
    mine = make_run(tmp_path / "a")
    make_run(tmp_path / "b", recipe="other")
    (make_run(tmp_path / "c") / "evals.jsonl").write_text("[]\n")
    pruned = make_run(tmp_path / "d", status="pruned")
    runs = list_recipe_runs(tmp_path, "mine", besides=tmp_path / "none")
    assert runs == [mine, tmp_path / "c", pruned]
    assert [curve.group for curve in read_own_curves(runs, "accuracy")] == [str(mine)]
    assert list_recipe_runs(tmp_path, "mine", besides=mine) == [tmp_path / "c", pruned]
    assert list_recipe_runs(tmp_path / "none", "mine", besides=mine) == []


@pytest.mark.parametrize("metrics", [None, 5, [1], {"accuracy": "high"}])
def test_curve_without_a_final_evaluation_ends_with_the_last_line(
    metrics: Any, tmp_path: Path
) -> None:
    run_dir = make_run(tmp_path / "a")
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps({**summary, "metrics": metrics}))
    (curve,) = read_own_curves([run_dir], "accuracy")
    assert to_values(curve.errors, "share")[-1] == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["evaluation", "training"])
def test_shipped_curves_are_of_fit_families_alone(kind: str) -> None:
    curves = read_shipped_curves(kind)  # type: ignore[arg-type]
    families = {curve.group for curve in curves}
    assert families == {family for family in FAMILIES if choose_side(family) == "fit"}
    assert all(curve.shares[-1] == 1 and np.isfinite(curve.errors).all() for curve in curves)
