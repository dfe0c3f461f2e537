"""Standings by made-up runs: targets, steps, intervals and verdicts by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.study.arena.standings import (
    Standing,
    compute_median_interval,
    find_best,
    find_target,
    judge_differences,
    judge_heat,
)
from tests.study.arena.runs import make_entry, make_failed_entry, make_heat, make_run

BASE = [[0.5, 0.70 + 0.01 * seed] for seed in range(8)]
"""Accuracies of eight runs: 0.70 to 0.77 at the end."""


def find(standings: tuple[Standing, ...], value: str) -> Standing:
    return next(item for item in standings if item.value == value)


def test_target_is_reached_by_more_than_half_of_the_runs() -> None:
    runs = [make_run(values) for values in BASE]
    assert find_target(runs, is_larger=True) == 0.73  # by 0.73 to 0.77
    assert find_target(runs, is_larger=False) == pytest.approx(0.74)  # by 0.70 to 0.74
    half = [make_run([None])] * 4 + runs[:4]
    assert find_target(half, is_larger=True) is None


def test_steps_are_the_median_of_the_first_evaluations_at_the_target() -> None:
    fast = [[0.74, 0.60 + 0.01 * seed] for seed in range(8)]
    judged = judge_heat(make_heat(make_entry("a", BASE), make_entry("b", fast)), "a")
    assert judged.target == 0.73
    own, base = find(judged.standings, "b"), find(judged.standings, "a")
    assert own.steps is not None
    assert base.steps is not None
    assert (own.steps.low, own.steps.median, own.steps.high) == (10, 10, 10)
    # Five of eight runs reach it at step 20, and three never.
    assert (base.steps.low, base.steps.median, base.steps.high) == (20, 20, math.inf)
    assert own.speedup == 2.0
    assert own.seconds is not None
    assert own.seconds.median == pytest.approx(0.02)


def test_value_that_never_reaches_the_target_has_no_speed() -> None:
    slow = [[0.1, 0.2]] * 8
    judged = judge_heat(make_heat(make_entry("a", BASE), make_entry("b", slow)), "a")
    own = find(judged.standings, "b")
    assert own.speedup == 0.0
    assert own.verdict == "worse"


def test_verdicts_follow_the_direction_of_the_metric() -> None:
    shifted = [[0.5, values[-1] + 0.1 + 0.001 * seed] for seed, values in enumerate(BASE)]
    entries = make_entry("a", BASE), make_entry("b", shifted)
    assert find(judge_heat(make_heat(*entries), "a").standings, "b").verdict == "better"
    by_loss = judge_heat(make_heat(*entries, metric="loss"), "a")
    assert find(by_loss.standings, "b").verdict == "worse"
    assert by_loss.best == "a"


def test_equal_bits_are_identical_and_small_differences_tie() -> None:
    mixed = [[0.5, values[-1] + 0.01 * (-1) ** seed] for seed, values in enumerate(BASE)]
    entries = make_entry("a", BASE), make_entry("b", BASE), make_entry("c", mixed)
    judged = judge_heat(make_heat(*entries), "a")
    assert find(judged.standings, "b").verdict == "identical"
    assert find(judged.standings, "c").verdict == "tied"
    assert {judged.best, *judged.tied_with_best} == {"a", "b", "c"}


def test_value_that_diverges_at_every_rate_stays() -> None:
    judged = judge_heat(make_heat(make_entry("a", BASE), make_failed_entry("b")), "a")
    own = find(judged.standings, "b")
    assert (own.verdict, own.diverged_trials, own.num_trials) == ("diverged", 2, 2)
    assert own.steps is None
    assert judged.best == "a"
    assert judged.tied_with_best == ()


def test_others_are_compared_if_the_baseline_diverges() -> None:
    judged = judge_heat(make_heat(make_failed_entry("a"), make_entry("b", BASE)), "a")
    assert judged.target is None
    assert find(judged.standings, "a").verdict == "diverged"
    assert find(judged.standings, "b").verdict == "better"
    assert judged.best == "b"


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_finite_runs_are_better_than_a_baseline_that_diverges_with_all_seeds(metric: str) -> None:
    """Also the worst one of six, which has no difference from the worst run of all."""
    diverged = make_entry("a", [[0.5, None]] * 6)
    judged = judge_heat(make_heat(diverged, make_entry("b", BASE[:6]), metric=metric), "a")
    assert find(judged.standings, "a").verdict == "diverged"
    own = find(judged.standings, "b")
    assert (own.verdict, own.pairs) == ("better", 6)


def test_runs_of_which_some_diverge_as_the_baseline_does_may_tie() -> None:
    diverged = make_entry("a", [[0.5, None]] * 6)
    some = make_entry("b", [*BASE[:2], *[[0.5, None]] * 4])
    judged = judge_heat(make_heat(diverged, some), "a")
    assert find(judged.standings, "b").verdict == "tied"


def test_all_may_diverge() -> None:
    judged = judge_heat(make_heat(make_failed_entry("a"), make_failed_entry("b")), "a")
    assert judged.best is None
    assert [item.verdict for item in judged.standings] == ["diverged", "diverged"]


def test_diverged_run_counts_as_the_worst() -> None:
    some = [[0.5, 0.9]] * 6 + [[0.5, None]] * 2
    judged = judge_heat(make_heat(make_entry("a", BASE), make_entry("b", some)), "a")
    own = find(judged.standings, "b")
    assert own.diverged_runs == 2
    assert own.mean == pytest.approx(0.9)
    # The last two pairs are 0.70 (the worst of all) against 0.76 and 0.77.
    assert own.difference is not None
    used = [0.9 - 0.01 * seed - 0.7 for seed in range(6)] + [-0.06, -0.07]
    assert own.difference == pytest.approx(np.mean(used[: own.pairs]))


def test_edges_of_the_trials_are_named() -> None:
    judged = judge_heat(make_heat(make_entry("a", BASE), make_entry("b", BASE)), "a")
    assert find(judged.standings, "b").at_edge == ("train.optimizer.lr",)


def rank(draws: np.ndarray) -> tuple[str | None, tuple[str, ...]]:
    """Return the best of values with accuracies (values, seeds), and what is tied with it."""
    entries = [make_entry(str(row), [[0.5]]) for row in range(len(draws))]
    standings = judge_heat(make_heat(*entries), "0").standings
    values = {str(row): dict(enumerate(numbers.tolist())) for row, numbers in enumerate(draws)}
    return find_best(values, standings, is_larger=True)


def test_best_of_equal_values_is_seldom_above_any() -> None:
    """The best is the greatest of six: with an undivided error, 18 % of draws have a worse one."""
    draws = np.random.default_rng(0).normal(size=(300, 6, 16))
    assert sum(len(rank(each)[1]) < 5 for each in draws) / 300 <= 0.05


@pytest.mark.parametrize(("values", "pairs"), [(2, 6), (3, 8), (4, 9), (5, 10), (6, 10)])
def test_more_values_need_more_pairs_to_name_a_best(values: int, pairs: int) -> None:
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(values, pairs)) + 100.0 * np.arange(values)[:, None]
    assert rank(draws) == (str(values - 1), ())
    assert len(rank(draws[:, :-1])[1]) == values - 1


@pytest.mark.parametrize("count", [6, 8, 9, 20, 41])
def test_interval_of_the_median_is_the_narrowest_that_holds_it(count: int) -> None:
    interval = compute_median_interval([float(number) for number in range(count)])
    cut = int(interval.low)
    assert interval.high == count - 1 - cut
    # The share of samples whose interval misses the median, by all ways to lie on one side.
    below = [math.comb(count, heads) / 2**count for heads in range(cut + 2)]
    assert 2 * sum(below[: cut + 1]) <= 0.05 < 2 * sum(below)


def test_interval_of_the_median_holds_it_in_draws() -> None:
    rng = np.random.default_rng(0)
    draws = rng.exponential(size=(2000, 12))
    missed = 0
    for row in draws:
        interval = compute_median_interval(row.tolist())
        missed += not interval.low <= math.log(2) <= interval.high
    assert 0.02 < missed / 2000 < 0.05  # 0.0386 by the binomial distribution


def test_few_runs_have_no_interval() -> None:
    interval = compute_median_interval([1.0, 2.0, 3.0])
    assert (interval.median, interval.low, interval.high) == (2.0, 0.0, math.inf)


def test_verdict_names_the_pairs_that_decide() -> None:
    differences = np.array([1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 1.0, 1.0, -9.0])
    verdict, pairs = judge_differences(differences, is_larger=True)
    assert verdict == "better"
    assert 6 <= pairs <= 8
    assert judge_differences(differences[:5], is_larger=True) == ("tied", 5)


def test_results_have_no_times() -> None:
    entries = make_entry("a", BASE), make_entry("b", BASE)
    one = judge_heat(make_heat(*entries), "a").to_dict()
    assert {"step_ms", "seconds"}.isdisjoint(one["standings"][0])
