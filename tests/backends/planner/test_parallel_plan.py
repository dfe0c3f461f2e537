"""Plans as files: saved, loaded, and refused with a message for each problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.backends.planner.dimension_groups import Mesh
from pipeline.backends.planner.parallel_plan import (
    ParallelPlan,
    ShardingRule,
    load_plan,
    make_rules,
    save_plan,
)
from pipeline.core.errors import RecipeError

PARAMETERS = {"body/dense_0/kernel": (64, 32), "body/dense_1/kernel": (64, 32), "head/bias": (12,)}
PLAN = ParallelPlan(
    mesh=Mesh(2, 4),
    batch=("data", "model"),
    specs=(
        ShardingRule("body/dense_*/kernel", ((), ("model",))),
        ShardingRule("head/bias", (("data", "model"),)),
    ),
    constraints=(ShardingRule("head", (("data",), ("model",))),),
)


def save_changed_plan(folder: Path, change: dict[str, Any]) -> Path:
    """Save a plan of 2 x 4 devices with changed keys; return the file."""
    path = folder / "plan.yaml"
    save_plan(ParallelPlan(Mesh(2, 4), ("data",)), path)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    return path


def test_saved_plan_is_loaded_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    save_plan(PLAN, path)
    sizes = {**PARAMETERS, "head/bias": (16,)}
    assert load_plan(path, 8, sizes) == PLAN
    text = path.read_text()
    assert "- pattern: body/dense_*/kernel\n  axes:\n  - null\n  - model\n" in text


def test_missing_or_invalid_plan_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    for text in (None, "mesh: [", "a: &a [*a]"):
        if text is not None:
            path.write_text(text)
        with pytest.raises(RecipeError, match=r"parallel\.plan = .*plan\.yaml: can't be read"):
            load_plan(path, 8, PARAMETERS)
    with pytest.raises(RecipeError, match=r"absent\.yaml: can.t be read: No such file"):
        load_plan(tmp_path / "absent.yaml", 8, PARAMETERS)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"mesch": 1}, "mesch = 1: there is no such key; did you mean mesh?"),
        ({"mesh": {"data": 2, "model": 2}}, "mesh = 2 x 2: has 4 devices; must have 8"),
        ({"mesh": {"data": 0, "model": 8}}, "mesh.data = 0: must be greater than 0"),
        ({"mesh": {"pipe": 8}}, "mesh.pipe = 8: there is no such key"),
        (
            {"batch": ["model", "data"]},
            "batch: ['model', 'data'] must be null, data, model or [data, model]",
        ),
        ({"specs": {"a": 1}}, "specs = {'a': 1}: must be a list"),
        ({"specs": [{"pattern": "head"}]}, "specs.0.axes: missing; it needs a value"),
        (
            {"specs": [{"pattern": "hed/bias", "axes": [None]}]},
            "specs.0.pattern = hed/bias: covers no parameter; head/bias is one",
        ),
        (
            {"specs": [{"pattern": "head/bias", "axes": [None, "model"]}]},
            "specs.0.axes = [null, model]: must have 1 entry, as head/bias is [12]",
        ),
        (
            {"specs": [{"pattern": "head/bias", "axes": [["data", "model"]]}]},
            "specs.0.axes = [data+model]: 8 devices don't divide dimension 0 of head/bias [12]; "
            "6 would, or a size of 16",
        ),
        (
            {"specs": [{"pattern": "body", "axes": ["model", "model"]}]},
            "specs.0.axes: [model, model]: an axis shards one dimension only",
        ),
        (
            {"constraints": [{"pattern": "head", "axes": ["rows"]}]},
            "constraints.0.axes.0: rows must be null, data, model or [data, model]",
        ),
        ({"specs": ["head"]}, "specs.0: head must be {pattern: ..., axes: [...]}"),
        (
            {"constraints": [{"pattern": "head", "axes": [["model", "data"]]}]},
            "constraints.0.axes.0: ['model', 'data'] must be null, data, model or [data, model]",
        ),
    ],
)
def test_invalid_plan_is_refused_with_key_and_value(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = save_changed_plan(tmp_path, change)
    with pytest.raises(RecipeError) as error:
        load_plan(path, 8, PARAMETERS)
    (found,) = error.value.problems
    assert found.startswith(f"parallel.plan {path}: ")
    assert problem in found


def test_plan_error_lists_all_problems(tmp_path: Path) -> None:
    change = {"mesch": 1, "specs": [{"pattern": "hed/bias", "axes": [None]}]}
    with pytest.raises(RecipeError) as error:
        load_plan(save_changed_plan(tmp_path, change), 8, PARAMETERS)
    unknown, uncovered = error.value.problems
    assert "mesch = 1: there is no such key" in unknown
    assert "covers no parameter" in uncovered


@pytest.mark.parametrize("given", [None, 3, [], "mesh"])
def test_plan_that_is_not_a_mapping_is_refused(given: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(given))
    with pytest.raises(RecipeError, match="must have the keys mesh, batch"):
        load_plan(path, 8, PARAMETERS)


def test_rules_are_few_and_the_last_match_wins() -> None:
    rows, columns = (("model",), ()), ((), ("model",))
    axes_by_path = {
        f"net/block{i}/dense_{j}": (columns if j else rows) for i in range(3) for j in range(2)
    }
    assert list(make_rules(axes_by_path)) == [
        ShardingRule("net/block*/dense_0", rows),
        ShardingRule("net/block*/dense_1", columns),
    ]
    # A path that has others below it comes first, so that theirs win.
    assert [rule.pattern for rule in make_rules({"net/a": rows, "net": columns})] == [
        "net",
        "net/a",
    ]
    assert list(make_rules({"a": ((), ()), "b": rows}, only_sharded=True)) == [
        ShardingRule("b", rows)
    ]
