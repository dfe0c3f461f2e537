"""Declarations of an arena: equal trials in spaces of equal width, and unused seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.core.errors import RecipeError, UsageError
from pipeline.study.arena.contest import (
    CENTRES,
    RATE,
    SHIPPED,
    Contest,
    SearchRange,
    choose_baseline,
    draw_places,
    make_custom_workload,
    parse_search,
    parse_searches,
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
        "num_seeds": 6,
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
    trial = contest.compose(DIGITS, "sgd", {RATE: 0.25}, contest.tuning_seed, is_trial=True)
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


DECAY = "train.optimizer.weight_decay"
MOMENTUM = "train.optimizer.momentum"
VALUES = ("adamw", "sgd")


def list_trials(*searches: str) -> list[list[dict[str, float]]]:
    contest = make_contest(searches=parse_searches(searches, "optimizer", VALUES))
    return [contest.list_trials(DIGITS, value) for value in VALUES]


def test_trials_with_a_key_of_one_value_are_at_the_same_places() -> None:
    """A search of one value moves the places of none: weight decay is an axis of both."""
    adamw, sgd = list_trials(f"adamw:{DECAY}=0.001,0.1")
    assert {frozenset(trial) for trial in adamw} == {frozenset({DECAY, RATE})}
    assert {frozenset(trial) for trial in sgd} == {frozenset({RATE})}
    ratios = [b[RATE] / a[RATE] for a, b in zip(adamw, sgd, strict=True)]
    assert ratios == pytest.approx([CENTRES["sgd"] / 0.003] * 5, rel=5e-3)
    # The order of the ranges isn't the order of a value's ranges.
    adamw, sgd = list_trials(
        f"sgd:{RATE}=0.1,1", f"sgd:{MOMENTUM}=0.1,0.9", f"adamw:{RATE}=0.001,0.01"
    )
    ratios = [b[RATE] / a[RATE] for a, b in zip(adamw, sgd, strict=True)]
    assert ratios == pytest.approx([100] * 5, rel=5e-3)


def test_trials_of_searches_for_all_values_stay_as_they_are() -> None:
    """Golden numbers: folders of earlier arenas continue."""
    assert [trial[RATE] for trial in list_trials()[0]] == [
        0.02263,
        0.001617,
        0.0001156,
        0.008259,
        0.0005903,
    ]
    pairs = [(trial[DECAY], trial[RATE]) for trial in list_trials(f"{DECAY}=0.001,0.1")[1]]
    assert pairs[:3] == [(0.07221, 0.1177), (0.02335, 0.006031), (0.007553, 0.3089)]


@pytest.mark.parametrize("order", [1, -1])
def test_range_of_a_value_wins_over_the_one_of_all_values(order: int) -> None:
    texts = [f"sgd:{RATE}=0.1,1", f"{RATE}=0.001,0.01"][::order]
    contest = make_contest(searches=parse_searches(texts, "optimizer", VALUES))
    assert contest.list_ranges(DIGITS, "sgd") == (SearchRange(RATE, 0.1, 1.0),)
    assert contest.list_ranges(DIGITS, "adamw") == (SearchRange(RATE, 0.001, 0.01),)


@pytest.mark.parametrize("prefix", ["", "sgd:"])
def test_second_range_of_a_key_is_refused(prefix: str) -> None:
    texts = [f"{prefix}{RATE}=0.1,1", f"{prefix}+{RATE}=0.1,2"]
    with pytest.raises(UsageError, match=r"=0.1,2: must be the only range of its key"):
        parse_searches(texts, "optimizer", VALUES)


@pytest.mark.parametrize(
    ("key", "searched", "problem"),
    [
        (RATE, RATE, "which arena compares"),
        (f"+{RATE}", RATE, "which arena compares"),
        (RATE, "train.optimizer", "which arena compares"),
        ("model", "model.dropout", "which arena compares"),
        ("optimizer", "seed", "which arena sets"),
        ("optimizer", "+dataset.folds.index", "which arena sets"),
        ("optimizer", "eval.every_epochs", "which arena sets"),
        ("optimizer", "eval", "which arena sets"),
        ("optimizer", "train.steps", "which arena sets"),
    ],
)
def test_keys_of_the_arena_are_not_searched(key: str, searched: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_search(f"{searched}=1,100", key, ("a", "b"))


def test_rate_of_a_compared_section_is_searched() -> None:
    _, item = parse_search(f"{RATE}=0.1,1", "train.optimizer", ("{name: sgd}", "{name: lion}"))
    assert item == SearchRange(RATE, 0.1, 1.0)


@pytest.mark.parametrize(
    "override",
    [
        *("eval.every_epochs=2", "eval.every_seconds=5", "autotune=on", "seed=3"),
        *("monitor.tensorboard=true", "eval={every_steps: 3}", "+dataset.folds={count: 2}"),
        *("stages=[data]", "monitor={sample_images: 2}", "train={steps: 3}", "~dataset.folds"),
    ],
)
def test_keys_that_the_arena_sets_are_refused(override: str) -> None:
    with pytest.raises(RecipeError, match="is set by arena"):
        make_custom_workload(["+recipe=lenet5_digits", override], None)


def test_numbers_stay_in_their_range() -> None:
    assert SearchRange("x", 0.9, 0.99999).choose(0.9999) == 0.99999
    assert SearchRange("x", 1.00004, 2.0).choose(0.0) == 1.00004
    narrow = SearchRange("x", 1.0, 1.001)
    assert len({narrow.choose(place / 10) for place in range(11)}) == 11
    assert SearchRange("x", 0.99, 0.999).choose(0.5) == 0.9945
    assert SearchRange(RATE, 9.49e-5, 0.0949).choose(0.123456) == 0.0002227


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
        require_values("--optimizers", values)


def test_baseline_is_adamw_or_the_first_value() -> None:
    assert choose_baseline("optimizer", ("sgd", "adamw"), None) == "adamw"
    assert choose_baseline("optimizer", ("sgd", "lion"), None) == "sgd"
    with pytest.raises(UsageError, match="must be one of sgd, lion"):
        choose_baseline("optimizer", ("sgd", "lion"), "adamw")


def test_values_are_compared_as_they_are_read() -> None:
    """Typed 1e30 is the value 1e+30, as a baseline and as the owner of a range too."""
    values = parse_values("--values 1e30,0.01", RATE, "1e30,0.01")
    assert values == ("1e+30", "0.01")
    assert choose_baseline(RATE, values, "1e30") == "1e+30"
    owner, _ = parse_search("1e30:train.optimizer.eps=0.1,1", RATE, values)
    assert owner == "1e+30"
    assert parse_values("", "name", "'a,b','<c>'") == ("'a,b'", "'<c>'")
    with pytest.raises(UsageError, match=r"--baseline 1e31: must be one of 1e\+30, 0.01"):
        choose_baseline(RATE, values, "1e31")
    with pytest.raises(UsageError, match=r"--baseline 1e30,0.01: must be one of"):
        choose_baseline(RATE, values, "1e30,0.01")


def test_values_that_need_quotes_are_refused_as_such() -> None:
    with pytest.raises(UsageError, match=r"--values <b>,c: must be typed in quotes, as .*<b>.*,c"):
        parse_values("--values <b>,c", "name", "<b>,c")


@pytest.mark.slow
def test_shipped_workloads_are_eight_valid_recipes() -> None:
    assert len({workload.name for workload in SHIPPED}) == 8
    contest = make_contest(workloads=SHIPPED)
    for workload in SHIPPED:
        for is_trial in (True, False):
            recipe = contest.compose(workload, "adamw", {RATE: 0.001}, 0, is_trial=is_trial)
            assert recipe.eval.every_steps == math.ceil(workload.steps / 20)
