"""The page, the numbers and the summary of an arena, by made-up runs."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.core.pages.page import write_page
from pipeline.study.arena.algoperf import STEP
from pipeline.study.arena.arena_page import (
    PAGE,
    RESULTS,
    TIMES,
    format_interval,
    format_verdict,
    make_page,
    summarize,
    write_results,
)
from pipeline.study.arena.contest import SHIPPED, Contest, ContestBudget
from pipeline.study.arena.contest_runs import Heat
from pipeline.study.arena.standings import MedianInterval, WorkloadStandings, judge_heat
from tests.study.arena.runs import make_entry, make_failed_entry, make_heat

NAMES = ("adamw", "<b>mine</b>", "sgd")
CONTEST = Contest("optimizer", NAMES, "adamw", (SHIPPED[0],), 2, 8, 0)


class TagCounter(HTMLParser):
    """Names of a page's elements and attributes, as a browser reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}


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
    assert "diverges in all 2 trials" in page
    assert "better by 0.2" in page


def test_every_name_on_the_page_is_escaped(tmp_path: Path) -> None:
    """The key, the values, in tips and texts, and the workload; quotes would end an attribute."""
    hostile = """"'><script>alert(1)</script>&amp;"""
    names = [f"{hostile}{number}" for number in range(3)]
    workload = replace(SHIPPED[0], name=hostile)
    entries = (
        make_entry(names[0], [[0.7]] * 8),
        make_entry(names[1], [[0.9]] * 8),
        make_failed_entry(names[2]),
    )
    heat = replace(make_heat(*entries), workload=workload)
    contest = Contest("model.name", tuple(names), names[0], (workload,), 2, 8, 0)
    page = make_page(
        replace(contest, key=hostile), [judge_heat(heat, names[0])], {STEP: {names[1]: 1.0}}
    )
    write_page(tmp_path / PAGE, page)
    text = (tmp_path / PAGE).read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;amp;" in text
    parser = TagCounter()
    parser.feed(text)
    assert parser.tags["script"] == 0
    assert not [name for name in parser.attributes if not re.fullmatch(r"[a-zA-Z-]+[0-9]?", name)]


def test_summary_names_the_best_and_what_fails(judged: WorkloadStandings) -> None:
    (line,) = summarize(CONTEST, [judged])
    assert line == (
        "digits: <b>mine</b>, accuracy 0.935; adamw is worse; sgd diverges in all 2 trials"
    )


def test_summary_calls_nothing_worse_that_has_diverged() -> None:
    heat = make_heat(make_entry("adamw", [[0.7]] * 8), make_failed_entry("sgd"))
    assert summarize(CONTEST, [judge_heat(heat, "adamw")]) == [
        "digits: adamw, accuracy 0.7; sgd diverges in all 2 trials"
    ]
    heat = make_heat(make_failed_entry("adamw"), make_failed_entry("sgd"))
    assert summarize(CONTEST, [judge_heat(heat, "adamw")]) == ["digits: every value diverges"]


def test_page_says_that_verdicts_are_about_tuned_settings(
    tmp_path: Path, heat: Heat, judged: WorkloadStandings
) -> None:
    write_results(tmp_path, CONTEST, [heat], [judged])
    page = (tmp_path / PAGE).read_text()
    assert "Verdicts are about the tuned settings" in page
    assert "Tuning has one seed, one split and few trials" in page
    entries = [replace(entry, trials=({},), trial_runs=()) for entry in heat.entries[:2]]
    untuned = replace(heat, entries=(*entries, replace(entries[0], value="sgd")))
    write_results(tmp_path, CONTEST, [untuned], [judge_heat(untuned, "adamw")])
    page = (tmp_path / PAGE).read_text()
    assert "Each verdict is wrong for equal sides in at most 5 %" in page
    assert "tuned settings" not in page


def test_grown_budget_is_on_the_page_and_in_the_results(
    tmp_path: Path, heat: Heat, judged: WorkloadStandings
) -> None:
    grown = replace(CONTEST, earlier_budgets=(ContestBudget(2, 6),))
    write_results(tmp_path, grown, [heat], [judged])
    results = json.loads((tmp_path / RESULTS).read_text())
    assert results["contest"]["earlier_budgets"] == [{"trials": 2, "seeds": 6}]
    page = (tmp_path / PAGE).read_text()
    assert "The budget has grown, from 2 trials and 6 seeds." in page
    # More pairs leave the settings as they are; more trials may not.
    assert "adds trials" not in page
    write_results(tmp_path, replace(grown, trials=3), [heat], [judged])
    assert "adds trials" in (tmp_path / PAGE).read_text()
    write_results(tmp_path, CONTEST, [heat], [judged])
    assert "grown" not in (tmp_path / PAGE).read_text()


def test_mean_of_some_runs_is_called_so(tmp_path: Path) -> None:
    """A mean without diverged runs isn't what the best is chosen by."""
    finals: list[list[float | None]] = [[0.9] if seed < 5 else [None] for seed in range(10)]
    heat = make_heat(make_entry("adamw", [[0.7]] * 10), make_entry("<b>mine</b>", finals))
    heat = replace(heat, entries=(*heat.entries, make_failed_entry("sgd")))
    judged = judge_heat(heat, "adamw")
    assert judged.standings[1].mean == pytest.approx(0.9)
    write_results(tmp_path, CONTEST, [heat], [judged])
    page = (tmp_path / PAGE).read_text()
    assert "mean of finite runs" in page
    assert "5 of 10 diverged" in page
    (line,) = summarize(CONTEST, [judged])
    assert line.startswith("digits: <b>mine</b>, accuracy 0.9 in its finite runs; tied with adamw")


def test_summary_names_what_is_tied_and_what_is_worse() -> None:
    finals = {"adamw": 0.9, "b": 0.9, "c": 0.5, "d": 0.4}
    entries = [make_entry(name, [[value]] * 10) for name, value in finals.items()]
    assert summarize(CONTEST, [judge_heat(make_heat(*entries), "adamw")]) == [
        "digits: adamw, accuracy 0.9; tied with b; c, d are worse"
    ]


def test_intervals_say_never() -> None:
    infinite = float("inf")
    assert format_interval(MedianInterval(20, 10, infinite), ".0f") == "20 (10 to never)"
    assert format_interval(MedianInterval(infinite, infinite, infinite), ".0f") == "never"
    assert format_interval(MedianInterval(20, 20, 20), ".0f") == "20"


def test_verdicts_are_words(judged: WorkloadStandings) -> None:
    words = [format_verdict(item, "adamw") for item in judged.standings]
    assert words[0] == "baseline"
    assert re.fullmatch(r"better by 0\.2 \([678] pairs\)", words[1])
    assert words[2] == "diverges in all 2 trials"


def test_words_of_divergence_say_what_has_diverged() -> None:
    """Trials; fresh seeds of a value that wasn't tuned; fresh seeds of a trial that trains."""
    lost = [[0.5, None]] * 6
    chosen = make_entry("chosen", lost)
    untuned = replace(chosen, value="untuned", trials=({},), trial_runs=())
    base = make_entry("adamw", [[0.7]] * 6)
    judged = judge_heat(
        make_heat(base, make_failed_entry("failed"), untuned, chosen), baseline="adamw"
    )
    assert [format_verdict(item, "adamw") for item in judged.standings[1:]] == [
        "diverges in all 2 trials",
        "diverges with all 6 fresh seeds",
        "diverges with all 6 fresh seeds of its chosen trial",
    ]


def test_missing_target_has_its_reason(tmp_path: Path) -> None:
    half = make_entry("adamw", [[0.7]] * 3 + [[None]] * 3)
    for base, words in (
        (half, "no target, since adamw diverges with 3 of 6 fresh seeds"),
        (make_failed_entry("adamw"), "no target, since adamw diverges in all 2 trials"),
    ):
        heat = make_heat(base, make_entry("<b>mine</b>", [[0.7]] * 6), make_failed_entry("sgd"))
        write_results(tmp_path, CONTEST, [heat], [judge_heat(heat, "adamw")])
        assert words in (tmp_path / PAGE).read_text()
