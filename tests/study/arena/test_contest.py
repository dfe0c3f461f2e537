"""Declarations of an arena: equal trials in spaces of equal width, and unused seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.core.errors import UsageError
from pipeline.study.arena.contest import (
    CENTRES,
    RATE,
    SHIPPED,
    Contest,
    SearchRange,
    draw_places,
    parse_search,
    parse_values,
    require_values,
)

DIGITS = SHIPPED[0]


def make_contest(**changed: object) -> Contest:
    facts: dict[str, object] = {
        "key": "optimizer",
        "values": ("adamw", "sgd"),
        "baseline": "adamw",
        "workloads": (DIGITS,),
        "trials": 5,
        "seeds": 6,
        "seed": 0,
    }
    return Contest(**{**facts, **changed})  # type: ignore[arg-type]


def test_places_fill_the_axis_evenly_at_every_number_of_trials() -> None:
    for count in (3, 5, 8, 13):
        places = np.sort(draw_places(7, count, 1)[:, 0])
        gaps = np.diff(np.append(places, places[0] + 1))
        # The golden ratio has at most three distances between neighbours, the largest of which is
        # at most the square of the ratio times the smallest.
        assert gaps.max() / gaps.min() < 2.7


def test_more_trials_keep_the_first_ones() -> None:
    np.testing.assert_array_equal(draw_places(1, 4, 2), draw_places(1, 9, 2)[:4])
    assert not np.array_equal(draw_places(1, 4, 2), draw_places(2, 4, 2))


def test_every_value_has_as_many_trials_in_a_space_of_the_same_width() -> None:
    contest = make_contest()
    trials = {value: contest.list_trials(DIGITS, value) for value in contest.values}
    assert [len(items) for items in trials.values()] == [5, 5]
    ratios = [
        sgd[RATE] / adamw[RATE] for sgd, adamw in zip(trials["sgd"], trials["adamw"], strict=True)
    ]
    # The same places of both spaces, whose centres differ; rates have four digits.
    assert ratios == pytest.approx([CENTRES["sgd"] / 0.003] * 5, rel=5e-3)
    rates = [trial[RATE] for trial in trials["adamw"]]
    assert min(rates) >= 0.003 / 10**1.5 * 0.99
    assert max(rates) <= 0.003 * 10**1.5 * 1.01


def test_fresh_seeds_are_no_trial_s() -> None:
    contest = make_contest(seed=40)
    assert contest.tuning_seed not in contest.final_seeds
    assert len(contest.final_seeds) == 6


def test_trials_evaluate_a_fold_and_fresh_seeds_the_evaluation_split() -> None:
    contest = make_contest()
    trial = contest.compose(DIGITS, "sgd", {RATE: 0.25}, contest.tuning_seed)
    final = contest.compose(DIGITS, "sgd", {RATE: 0.25}, contest.final_seeds[0])
    assert trial.dataset.folds is not None
    assert final.dataset.folds is None
    assert (trial.train.optimizer.name, trial.train.optimizer.lr) == ("sgd", 0.25)
    assert trial.train.steps == final.train.steps == DIGITS.steps


def test_compared_rate_is_not_tuned() -> None:
    contest = make_contest(key=RATE, values=("0.1", "0.3"), baseline="0.1")
    assert contest.list_trials(DIGITS, "0.1") == [{}]


def test_typed_range_takes_the_place_of_the_declared_one() -> None:
    searches = (parse_search("sgd:train.optimizer.lr=0.1,1", "optimizer", ("adamw", "sgd")),)
    contest = make_contest(searches=searches)
    assert contest.list_ranges(DIGITS, "sgd") == (SearchRange(RATE, 0.1, 1.0),)
    assert contest.list_ranges(DIGITS, "adamw")[0].high < 0.2


@pytest.mark.parametrize(
    "text", ["lr", "lr=1", "lr=1,2,3", "lr=0,1", "lr=2,1", "lr=a,b", "=1,2", "lr=1,inf", "lr=nan,1"]
)
def test_wrong_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be KEY=LOW,HIGH"):
        parse_search(text, "optimizer", ("adamw",))


def test_range_of_an_absent_value_is_refused() -> None:
    with pytest.raises(UsageError, match="lion must be one of adamw, sgd"):
        parse_search("lion:train.optimizer.lr=0.1,1", "optimizer", ("adamw", "sgd"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("adamw",), "must be 2 to 6 values"),
        (tuple("abcdefg"), "must be 2 to 6 values"),
        (("sgd", "sgd"), "must be different"),
    ],
)
def test_wrong_values_are_refused(values: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        require_values("optimizer", values, None)


def test_baseline_is_adamw_or_the_first_value() -> None:
    assert require_values("optimizer", ("sgd", "adamw"), None) == "adamw"
    assert require_values("optimizer", ("sgd", "lion"), None) == "sgd"
    with pytest.raises(UsageError, match="must be one of sgd, lion"):
        require_values("optimizer", ("sgd", "lion"), "adamw")


def test_values_are_compared_as_they_are_read() -> None:
    """Typed 1e30 is the value 1e+30, as a baseline and as the owner of a range too."""
    values = parse_values("--values 1e30,0.01", RATE, "1e30,0.01")
    assert values == ("1e+30", "0.01")
    assert require_values(RATE, values, "1e30") == "1e+30"
    owner, _ = parse_search("1e30:train.optimizer.eps=0.1,1", RATE, values)
    assert owner == "1e+30"
    assert parse_values("", "name", "'a,b','<c>'") == ("'a,b'", "'<c>'")
    with pytest.raises(UsageError, match=r"--baseline 1e31: must be one of 1e\+30, 0.01"):
        require_values(RATE, values, "1e31")
    with pytest.raises(UsageError, match=r"--baseline 1e30,0.01: must be one of"):
        require_values(RATE, values, "1e30,0.01")


def test_values_that_need_quotes_are_refused_as_such() -> None:
    with pytest.raises(UsageError, match=r"--values <b>,c: must be typed in quotes, as .*<b>.*,c"):
        parse_values("--values <b>,c", "name", "<b>,c")


@pytest.mark.slow
def test_shipped_workloads_are_eight_valid_recipes() -> None:
    assert len({workload.name for workload in SHIPPED}) == 8
    contest = make_contest(workloads=SHIPPED)
    for workload in SHIPPED:
        for seed in (0, 1):
            recipe = contest.compose(workload, "adamw", {RATE: 0.001}, seed)
            assert recipe.eval.every_steps == math.ceil(workload.steps / 20)
