"""The page, the numbers and the summary of an arena, by made-up runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipeline.study.arena.arena_page import (
    PAGE,
    RESULTS,
    TIMES,
    format_interval,
    format_verdict,
    summarize,
    write_results,
)
from pipeline.study.arena.contest import SHIPPED, Contest
from pipeline.study.arena.contest_runs import Heat
from pipeline.study.arena.standings import MedianInterval, WorkloadStandings, judge_heat
from tests.study.arena.runs import make_entry, make_failed_entry, make_heat

NAMES = ("adamw", "<b>mine</b>", "sgd")
CONTEST = Contest("optimizer", NAMES, "adamw", (SHIPPED[0],), 2, 8, 0)


@pytest.fixture
def heat() -> Heat:
    base = [[0.5, 0.70 + 0.01 * seed] for seed in range(8)]
    better = [[0.8, 0.90 + 0.01 * seed] for seed in range(8)]
    return make_heat(
        make_entry("adamw", base), make_entry("<b>mine</b>", better), make_failed_entry("sgd")
    )


@pytest.fixture
def judged(heat: Heat) -> WorkloadStandings:
    return judge_heat(heat, "adamw")


def test_files_have_verdicts_scores_and_times(
    tmp_path: Path, heat: Heat, judged: WorkloadStandings
) -> None:
    facts = write_results(tmp_path, CONTEST, [heat], [judged])
    results = json.loads((tmp_path / RESULTS).read_text())
    assert [item["verdict"] for item in results["workloads"][0]["standings"]] == [
        "baseline",
        "better",
        "diverged",
    ]
    # The baseline takes step 20, the other step 10: it counts from a ratio of 2 on.
    assert results["score_by_steps"] == {
        "adamw": pytest.approx(2 / 3, abs=3 / 99 / 3),
        "<b>mine</b>": 1.0,
        "sgd": 0.0,
    }
    assert "step_ms" not in (tmp_path / RESULTS).read_text()
    times = json.loads((tmp_path / TIMES).read_text())
    assert times["workloads"]["digits"]["adamw"]["step_ms"] == 2.0
    # An infinite number is null: the interval ends at a run that never reaches the target.
    assert times["workloads"]["digits"]["adamw"]["seconds"]["high"] is None
    assert facts["score_by_steps"] == results["score_by_steps"]


def test_page_is_self_contained_and_escapes_names(
    tmp_path: Path, heat: Heat, judged: WorkloadStandings
) -> None:
    write_results(tmp_path, CONTEST, [heat], [judged])
    page = (tmp_path / PAGE).read_text()
    assert "<b>mine" not in page
    assert "&lt;b&gt;mine" in page
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "diverges at every rate (2 tried)" in page
    assert "better by 0.2" in page


def test_summary_names_the_best_and_what_fails(judged: WorkloadStandings) -> None:
    (line,) = summarize(CONTEST, [judged])
    assert line == (
        "digits: <b>mine</b>, accuracy 0.935; all others are worse; sgd diverges at every rate"
    )


def test_intervals_say_never() -> None:
    infinite = float("inf")
    assert format_interval(MedianInterval(20, 10, infinite), ".0f") == "20 (10 to never)"
    assert format_interval(MedianInterval(infinite, infinite, infinite), ".0f") == "never"
    assert format_interval(MedianInterval(20, 20, 20), ".0f") == "20"


def test_verdicts_are_words(judged: WorkloadStandings) -> None:
    words = [format_verdict(item, "adamw") for item in judged.standings]
    assert words[0] == "baseline"
    assert re.fullmatch(r"better by 0\.2 \([678] pairs\)", words[1])
    assert words[2] == "diverges at every rate (2 tried)"
