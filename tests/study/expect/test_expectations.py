"""Sections `expect` of recipes: their forms, and one message for all that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline import load_recipe
from pipeline.core.errors import RecipeError, UsageError
from pipeline.core.files.paths import RECIPES
from pipeline.study.expect.expectations import (
    FigureBound,
    FigureValue,
    find_tested_recipes,
    parse_expectations,
)

MINE = """# @package _global_
defaults:
  - lenet5_digits
"""


def write_recipe(folder: Path, text: str, name: str = "mine") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(f"{MINE}{text}")
    return file


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("accuracy", ">= 0.985", FigureBound(">=", 0.985, False)),
        ("step_ms", "<= 1.2x", FigureBound("<=", 1.2, True)),
        ("loss@100", "recorded", FigureValue(None, None, False)),
        ("loss@100", "recorded +- 20%", FigureValue(None, 0.2, True)),
        ("loss@100", "0.76+-1e-3", FigureValue(0.76, 0.001, False)),
        ("train_accuracy", "> 0.5", FigureBound(">", 0.5, False)),
        ("learns", True, None),
    ],
)
def test_section_is_parsed(key: str, value: Any, rule: FigureBound | FigureValue | None) -> None:
    (expectation,) = parse_expectations({key: value})
    assert expectation.rule == rule
    assert expectation.step == (100 if "@" in key else None)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("acuracy", ">= 0.9", "did you mean accuracy"),
        ("loss@0", "recorded", "steps count from 1"),
        ("accuracy@5", "recorded", "there is no such figure of a step"),
        ("loss@1.5", "recorded", "the key must be a figure"),
        ("accuracy", 0.9, "a number needs a tolerance"),
        ("accuracy", "0.9", "a number needs a tolerance"),
        ("accuracy", "about 0.9", "must be a bound as in"),
        ("accuracy", "0.9 +- -1", "a tolerance must be at least 0"),
        ("accuracy", True, "must be a bound as in"),
        ("step_ms", "recorded", "a time never repeats"),
        ("step_ms", "<= 0x", "a multiple must be above 0"),
        ("train_step_ms", "<= 3", "there is no such figure of a run"),
        ("learns", False, "must be true; leave it out instead"),
    ],
)
def test_wrong_expectation_is_explained(key: str, value: Any, problem: str) -> None:
    with pytest.raises(RecipeError, match="expect") as error:
        parse_expectations({key: value, "loss@7": "recorded"})
    (text,) = error.value.problems
    assert text.startswith(f"expect.{key} = ")
    assert problem in text


@pytest.mark.parametrize("section", [[], {}, 3, {"accuracy": None}])
def test_section_without_figures_is_refused(section: Any) -> None:
    with pytest.raises(RecipeError, match="expect"):
        parse_expectations(section)


def test_all_problems_are_reported() -> None:
    with pytest.raises(RecipeError) as error:
        parse_expectations({"acuracy": "> 1", "loss@0": "recorded"})
    assert len(error.value.problems) == 2


@pytest.mark.medium
def test_training_ignores_the_section(tmp_path: Path) -> None:
    plain = write_recipe(tmp_path, "train: {batch_size: 16}\n", "plain")
    wrong = write_recipe(tmp_path, "train: {batch_size: 16}\nexpect: {nonsense: 1}\n", "wrong")
    recipe = load_recipe(str(wrong)).model_copy(update={"name": "plain"})
    assert recipe == load_recipe(str(plain))


@pytest.mark.medium
def test_misspelt_section_is_refused(tmp_path: Path) -> None:
    file = write_recipe(tmp_path, "expects: {accuracy: '> 0.5'}\n")
    with pytest.raises(RecipeError, match="expects"):
        load_recipe(str(file))


@pytest.mark.medium
def test_recipe_inherits_expectations_and_removes_them(tmp_path: Path) -> None:
    file = write_recipe(tmp_path, "expect: {loss@20: recorded, loss@100: null, learns: null}\n")
    (tested,) = find_tested_recipes([str(file)])
    assert [item.key for item in tested.expectations] == ["accuracy", "loss@20"]
    assert tested.steps is None


@pytest.mark.medium
def test_steps_alone_need_a_short_run(tmp_path: Path) -> None:
    others = "accuracy: null, learns: null"
    file = write_recipe(tmp_path, f"expect: {{loss@20: recorded, {others}}}\n")
    (tested,) = find_tested_recipes([str(file)])
    assert tested.steps == 100


@pytest.mark.medium
def test_recipes_of_the_folder_are_those_with_the_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "recipes", "train: {batch_size: 16}\n", "plain")
    with pytest.raises(UsageError, match="has a section expect"):
        find_tested_recipes([])
    file = write_recipe(tmp_path / "recipes", "expect: {loss@5: recorded}\n", "tested")
    assert [tested.file for tested in find_tested_recipes([])] == [file.relative_to(tmp_path)]


@pytest.mark.medium
def test_problems_of_all_recipes_are_reported(tmp_path: Path) -> None:
    first = write_recipe(tmp_path, "expect: {loss@0: recorded}\n", "first")
    with pytest.raises(RecipeError) as error:
        find_tested_recipes([str(first), "resnet50_cifar10"])
    assert len(error.value.problems) == 2
    assert "first.yaml: expect.loss@0" in error.value.problems[0]
    assert "has no section expect" in error.value.problems[1]


@pytest.mark.medium
def test_step_after_the_end_is_refused_before_training(tmp_path: Path) -> None:
    section = (
        "train: {epochs: null, steps: 40}\n"
        "expect: {loss@40: recorded, loss@41: recorded, loss@100: null}\n"
    )
    with pytest.raises(RecipeError, match=r"expect\.loss@41: the run ends at step 40") as error:
        find_tested_recipes([str(write_recipe(tmp_path, section, "tested"))])
    assert len(error.value.problems) == 1


@pytest.mark.slow
def test_shipped_sections_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)
    assert len(find_tested_recipes([])) >= 4
