"""Recipes that share a program, and the keys that keep others apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.study.population.groups import (
    FOLD,
    collect_numbers,
    find_differing_keys,
    group_recipes,
    make_program_key,
    require_population,
)

Tiny = Callable[..., Recipe]


@pytest.mark.medium
@pytest.mark.parametrize(
    "override",
    [
        "seed=7",
        "train.optimizer.lr=0.2",
        "schedule=cosine",
        "train.optimizer.momentum=0.5",
        "train.loss.smoothing=0.2",
        "model.init.rules=[{pattern: '*/bias', init: {name: constant, value: 1.0}}]",
        "monitor.loss_every=0",
        "checkpoint.every_steps=5",
        "name=another",
    ],
)
def test_numeric_and_host_settings_share_a_program(tiny: Tiny, override: str) -> None:
    base = ("train.loss.smoothing=0.1", "train.optimizer.momentum=0.9")
    assert make_program_key(tiny(*base)) == make_program_key(tiny(*base, override))


@pytest.mark.medium
def test_folds_share_a_program_unless_their_constants_differ(tiny: Tiny) -> None:
    folds = [tiny(f"dataset.folds.index={index}") for index in (0, 3)]
    assert make_program_key(folds[0]) == make_program_key(folds[1])
    assert [collect_numbers(fold)[FOLD] for fold in folds] == [0, 3]
    assert FOLD not in collect_numbers(tiny())
    # The step of a fold has turned out to differ.
    apart = group_recipes({"0": folds[0], "1": folds[1]}, {FOLD})
    assert find_differing_keys(apart) == [FOLD]
    assert make_program_key(tiny("dataset.folds.count=4")) != make_program_key(folds[0])


@pytest.mark.medium
@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("train.batch_size=8", ["train.batch_size"]),
        ("train.loss.smoothing=0", ["train.loss.smoothing"]),
        ("train.optimizer.nesterov=true", ["train.optimizer.nesterov"]),
        ("train.clip.norm=1.0", ["train.clip.norm"]),
        ("train.steps=50", ["train.steps"]),
    ],
)
def test_compiled_settings_separate_groups(tiny: Tiny, override: str, keys: list[str]) -> None:
    base = ("train.loss.smoothing=0.1",)
    recipes = {"0": tiny(*base), "1": tiny(*base, "seed=5"), "2": tiny(*base, override)}
    groups = group_recipes(recipes)
    assert list(groups.values()) == [["0", "1"], ["2"]]
    assert find_differing_keys(groups) == keys
    require_population(recipes, groups)


@pytest.mark.medium
def test_compiled_number_separates_groups(tiny: Tiny) -> None:
    key = "train.optimizer.momentum"
    recipes = {str(m): tiny(f"{key}={m}") for m in (0.9, 0.8)}
    assert len(group_recipes(recipes)) == 1
    assert len(group_recipes(recipes, [key])) == 2


@pytest.mark.medium
def test_values_of_listed_features_are_compiled(tiny: Tiny) -> None:
    """Members that differ in one have separate programs; a sweep of such values is refused."""
    recipes = {
        f"{rate}, {seed}": tiny(
            f"train.features=[{{name: lookahead, steps: 3, rate: {rate}}}]", f"seed={seed}"
        )
        for rate in (0.5, 0.8)
        for seed in (1, 2)
    }
    groups = group_recipes(recipes)
    assert list(groups.values()) == [["0.5, 1", "0.5, 2"], ["0.8, 1", "0.8, 2"]]
    assert find_differing_keys(groups) == ["train.features.0.rate"]
    require_population(recipes, groups)
    rates = {name: recipes[name] for name in ("0.5, 1", "0.8, 1")}
    with pytest.raises(RecipeError, match=r"they differ in train\.features\.0\.rate; must differ"):
        require_population(rates, group_recipes(rates))


@pytest.mark.medium
def test_sweep_without_shared_programs_is_refused(tiny: Tiny) -> None:
    recipes = {str(size): tiny(f"train.batch_size={size}") for size in (8, 16)}
    with pytest.raises(RecipeError) as error:
        require_population(recipes, group_recipes(recipes))
    text = str(error.value)
    assert "no two of 2 jobs can share a program: they differ in train.batch_size" in text
    assert "must differ only in seed, train.optimizer.lr" in text
    one = {"8": recipes["8"]}
    require_population(one, group_recipes(one))


@pytest.mark.medium
def test_unsuitable_member_recipe_is_refused(tiny: Tiny) -> None:
    recipes = {str(seed): tiny(f"seed={seed}", "train.mode=eager") for seed in (1, 2)}
    with pytest.raises(RecipeError, match=r"train.mode = eager: must be graph with hydra.sweeper"):
        require_population(recipes, group_recipes(recipes))
