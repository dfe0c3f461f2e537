from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.study.sweep.verdict import describe_contrast, require_comparable

Tiny = Callable[..., Recipe]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("seed=2", "seed = 2: was 1 on side A; must be equal: each pair has the same seed"),
        ("dataset.eval.batch_size=8", "evaluated on the same samples"),
        ("++dataset.eval_size=20", "dataset.eval_size = 20: was 40 on side A"),
        ("eval.samples=10", "eval.samples = 10: was all on side A; must be equal: both sides are"),
    ],
)
def test_changes_of_the_measurement_are_refused(tiny: Tiny, override: str, rule: str) -> None:
    with pytest.raises(RecipeError) as error:
        require_comparable(tiny(), tiny(override), None)
    assert rule in str(error.value)


def test_comparison_error_lists_all_problems(tiny: Tiny) -> None:
    with pytest.raises(RecipeError) as error:
        require_comparable(tiny(), tiny("seed=2", "eval.samples=10"), None)
    assert len(error.value.problems) == 2


def test_different_losses_are_compared_only_by_other_metrics(tiny: Tiny) -> None:
    smoothed = tiny("train.loss.smoothing=0.1")
    require_comparable(tiny(), smoothed, "accuracy")
    for metric in ("loss", "train_loss"):
        with pytest.raises(RecipeError, match="two different losses"):
            require_comparable(tiny(), smoothed, metric)


@pytest.mark.medium
@pytest.mark.parametrize(
    "override", ["dataset.exclude=wrong.csv", "dataset.train.select=[{name: take, samples: 30}]"]
)
def test_fold_has_the_same_samples_on_both_sides(tiny: Tiny, override: str) -> None:
    folds = "++dataset.folds={count: 3}"
    with pytest.raises(RecipeError, match=r"must be equal with dataset\.folds"):
        require_comparable(tiny(folds), tiny(folds, override), None)


def test_equal_sides_are_refused(tiny: Tiny) -> None:
    with pytest.raises(RecipeError, match="side B: has the recipe of side A"):
        require_comparable(tiny(), tiny(), None)


@pytest.mark.parametrize(
    "override",
    [
        *("train.sink_size=7", "model=mlp", "dataset.train.buffer_size=10", "eval.every_steps=3"),
        *("dataset.exclude=wrong.csv", "dataset.train.select=[{name: take, samples: 30}]"),
    ],
)
def test_sides_can_differ_in_training(tiny: Tiny, override: str) -> None:
    require_comparable(tiny(), tiny(override), "loss")


def test_contrast_has_both_values_of_each_key_that_differs(tiny: Tiny) -> None:
    side_b = tiny("train.optimizer.lr=0.5", "train.batch_size=10")
    assert describe_contrast(tiny("train.optimizer.lr=0.25", "train.batch_size=5"), side_b) == (
        "A has train.batch_size=5, train.optimizer.lr=0.25; "
        "B has train.batch_size=10, train.optimizer.lr=0.5"
    )
    many = tiny("optimizer=adam", "schedule=cosine")
    assert re.search(r"; B has ([^,]+, ){3}[^,]+ and \d+ more$", describe_contrast(tiny(), many))
