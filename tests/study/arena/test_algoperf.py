"""AlgoPerf's logs and scores, against values by hand and the exact area of the profile."""

from __future__ import annotations

import csv
import math
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.study.arena.algoperf import (
    LOGS,
    MEASUREMENTS,
    STEP,
    TIME,
    Goal,
    compute_scores,
    format_measurements,
    read_times,
    write_logs,
)
from tests.study.arena.runs import make_entry, make_heat, make_run

ACCURATE = Goal("accuracy", 0.7, is_larger=True)
STUDIES = [[0.5, 0.7, 0.9], [0.8, 0.2, 0.1], [0.1, 0.2, 0.3]]
"""Accuracies of three studies, which reach 0.7 at step 20, at step 10 and never."""


def test_measurements_have_the_columns_that_are_scored() -> None:
    text = format_measurements(make_run([0.5, None], step_ms=4.0), "accuracy")
    rows = list(csv.DictReader(StringIO(text)))
    assert [row["global_step"] for row in rows] == ["10", "20"]
    assert [float(row["score"]) for row in rows] == [0.04, 0.08]
    assert rows[0]["score"] == rows[0]["accumulated_submission_time"]
    assert [float(row["validation/accuracy"]) for row in rows] == pytest.approx(
        [0.5, math.nan], nan_ok=True
    )


def test_logs_are_in_the_folders_of_the_benchmark(tmp_path: Path) -> None:
    write_logs(tmp_path / LOGS, [make_heat(make_entry("a", STUDIES))], {"a": "0_a"})
    files = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob(MEASUREMENTS))
    assert files == [
        f"algoperf/0_a/study_{number}/digits_jax/trial_1/eval_measurements.csv"
        for number in (1, 2, 3)
    ]


def test_time_is_the_median_over_studies(tmp_path: Path) -> None:
    write_logs(tmp_path, [make_heat(make_entry("a", STUDIES))], {"a": "0_a"})
    goals = {"digits": ACCURATE}
    assert read_times(tmp_path, "0_a", goals, STEP) == {"digits": 20}
    assert read_times(tmp_path, "0_a", goals, TIME) == {"digits": pytest.approx(0.04)}
    unreached = {"digits": Goal("accuracy", 0.95, is_larger=True)}
    assert read_times(tmp_path, "0_a", unreached, STEP) == {"digits": math.inf}
    smaller = {"digits": Goal("accuracy", 0.25, is_larger=False)}
    assert read_times(tmp_path, "0_a", smaller, STEP) == {"digits": 20}


def test_fastest_trial_of_a_study_counts(tmp_path: Path) -> None:
    write_logs(tmp_path, [make_heat(make_entry("a", STUDIES))], {"a": "0_a"})
    place = tmp_path / "0_a" / "study_3" / "digits_jax" / "trial_2"
    place.mkdir()
    (place / MEASUREMENTS).write_text(format_measurements(make_run([0.99]), "accuracy"))
    assert read_times(tmp_path, "0_a", {"digits": ACCURATE}, STEP) == {"digits": 10}


def test_logs_of_more_seeds_are_removed(tmp_path: Path) -> None:
    write_logs(tmp_path, [make_heat(make_entry("a", [*STUDIES, [0.0], [0.0]]))], {"a": "0_a"})
    assert read_times(tmp_path, "0_a", {"digits": ACCURATE}, STEP) == {"digits": math.inf}
    write_logs(tmp_path, [make_heat(make_entry("a", STUDIES))], {"a": "0_a"})
    assert len(list(tmp_path.rglob(MEASUREMENTS))) == 3
    assert read_times(tmp_path, "0_a", {"digits": ACCURATE}, STEP) == {"digits": 20}


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "global_step,validation/accuracy\n1,x\n"])
def test_damaged_log_is_named(tmp_path: Path, text: str) -> None:
    place = tmp_path / "0_a" / "study_1" / "digits_jax" / "trial_1"
    place.mkdir(parents=True)
    (place / MEASUREMENTS).write_text(text)
    if not text:
        assert read_times(tmp_path, "0_a", {"digits": ACCURATE}, STEP) == {"digits": math.inf}
        return
    with pytest.raises(DataError, match="isn't a log of evaluations"):
        read_times(tmp_path, "0_a", {"digits": ACCURATE}, STEP)


def test_scores_by_hand() -> None:
    times = {
        "fast": {"one": 10.0, "two": 10.0},
        "slow": {"one": 25.0, "two": 10.0},
        "late": {"one": 41.0, "two": math.inf},
    }
    scores = compute_scores(times)
    assert scores["fast"] == 1.0
    # The first workload counts from a ratio of 2.5 on, half of the axis from 1 to 4; the profile is
    # a half before, one after. The points of the axis are 3 / 99 apart.
    assert scores["slow"] == pytest.approx(0.75, abs=3 / 99 / 3)
    assert scores["late"] == 0.0


def test_scores_are_the_area_of_the_profile() -> None:
    rng = np.random.default_rng(3)
    times = {
        name: {str(number): float(value) for number, value in enumerate(rng.uniform(1, 6, 8))}
        for name in "abcd"
    }
    times["a"]["3"] = math.inf
    for name, score in compute_scores(times).items():
        ratios = [times[name][key] / min(own[key] for own in times.values()) for key in times[name]]
        exact = sum(max(0.0, 4 - ratio) for ratio in ratios) / 8 / 3
        assert score == pytest.approx(exact, abs=3 / 99 / 3)


def test_unreached_workload_adds_nothing_to_a_score() -> None:
    times = {"a": {"one": math.inf, "two": 1.0}, "b": {"one": math.inf, "two": 1.0}}
    assert compute_scores(times) == {"a": 0.5, "b": 0.5}
    assert compute_scores({"a": {}, "b": {}}) == {"a": 0.0, "b": 0.0}


def test_goal_that_is_reached_at_step_0_is_the_fastest() -> None:
    assert compute_scores({"a": {"one": 0.0}, "b": {"one": 2.0}}) == {"a": 1.0, "b": 0.0}
    assert compute_scores({"a": {"one": 0.0}, "b": {"one": 0.0}}) == {"a": 1.0, "b": 1.0}
