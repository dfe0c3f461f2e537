"""Results of an arena as files: its page, its numbers, its measured times and its logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.core.files.atomic_write import write_json
from pipeline.core.pages.charts import LETTER
from pipeline.core.pages.page import (
    Block,
    Charts,
    Drawing,
    Legend,
    Page,
    RowTable,
    Section,
    write_page,
)
from pipeline.study.arena.algoperf import (
    LOGS,
    STEP,
    TIME,
    Goal,
    compute_scores,
    read_times,
    write_logs,
)
from pipeline.study.arena.contest import Contest
from pipeline.study.arena.contest_runs import Heat, make_slug
from pipeline.study.arena.standings import MedianInterval, Standing, Verdict, WorkloadStandings
from pipeline.study.runs.ranking import is_larger_better

RESULTS = "results.json"
"""File of everything that repeats bit for bit."""
TIMES = "times.json"
"""File of what was measured by the clock."""
PAGE = "arena.html"
MEAN = "mean of finite runs"
"""Column of `Standing.mean`, which diverged runs aren't in; the best is chosen with them."""
COLOURS: Mapping[Verdict, str] = {
    "baseline": "slate",
    "better": "blue",
    "worse": "orange",
    "tied": "gap",
    "identical": "gap",
    "diverged": "red",
}
MARKS: Mapping[Verdict, str] = {
    "baseline": "\u2022",
    "better": "+",
    "worse": "\u2212",
    "tied": "=",
    "identical": "=",
    "diverged": "\u00d7",
}
"""Colour and sign of a tile."""
LEGEND = {
    "blue": "+ better than the baseline",
    "gap": "= tied with it",
    "orange": "\u2212 worse",
    "red": "\u00d7 diverges",
    "slate": "\u2022 the baseline",
}
TILE = 30.0
ROW = 28.0
"""Width and height of a tile, in pixels."""
MOST_LETTERS = 19
NEVER = 366.0
"""Place of runs that never reach the target, in pixels."""


def write_results(
    folder: Path, contest: Contest, heats: Sequence[Heat], judged: Sequence[WorkloadStandings]
) -> dict[str, Any]:
    """Write all files of an arena, and return its facts for JSON.

    Raises RunError if a file can't be written.
    """
    names = {value: f"{index}_{make_slug(value)}" for index, value in enumerate(contest.values)}
    write_logs(folder / LOGS, heats, names)
    goals = {
        item.workload: Goal(item.metric, item.target, is_larger_better(item.metric))
        for item in judged
        if item.target is not None
    }
    scores = {
        column: compute_scores(
            {value: read_times(folder / LOGS, name, goals, column) for value, name in names.items()}
        )
        for column in (STEP, TIME)
    }
    results = {
        "contest": contest.to_dict(),
        "workloads": [item.to_dict() for item in judged],
        "score_by_steps": scores[STEP],
        "summary": [*summarize(contest, judged)],
    }
    times = {
        "note": "measured beside the arena's other runs; doesn't repeat",
        "score_by_seconds": scores[TIME],
        "workloads": {
            item.workload: {standing.value: standing.to_times() for standing in item.standings}
            for item in judged
        },
    }
    write_json(folder / RESULTS, results)
    write_json(folder / TIMES, times)
    write_page(folder / PAGE, make_page(contest, judged, scores))
    return {**results, "measured": times}


def summarize(contest: Contest, judged: Sequence[WorkloadStandings]) -> list[str]:
    """Return a line for each workload with the best value, and what is tied with it, is worse or
    diverges."""
    lines = []
    for item in judged:
        facts = [f"{item.workload}: every value diverges"]
        if item.best is not None:
            best = next(standing for standing in item.standings if standing.value == item.best)
            diverged = [standing for standing in item.standings if standing.mean is None]
            besides = {item.best, *item.tied_with_best, *(standing.value for standing in diverged)}
            worse = [standing.value for standing in item.standings if standing.value not in besides]
            finite = " in its finite runs" if best.diverged_runs else ""
            facts = [f"{item.workload}: {item.best}, {item.metric} {best.mean:.4g}{finite}"]
            if item.tied_with_best:
                facts.append(f"tied with {', '.join(item.tied_with_best)}")
            if worse:
                facts.append(f"{', '.join(worse)} {'is' if len(worse) == 1 else 'are'} worse")
            facts += [f"{standing.value} {describe_divergence(standing)}" for standing in diverged]
        lines.append("; ".join(facts))
    return lines


def format_interval(interval: MedianInterval, form: str) -> str:
    """Return a median and its interval as text."""

    def show(number: float) -> str:
        return format(number, form) if math.isfinite(number) else "never"

    middle, low, high = (show(item) for item in (interval.median, interval.low, interval.high))
    if low == middle == high:
        return middle
    return f"{middle} ({low} to {high})"


def format_verdict(item: Standing, baseline: str) -> str:
    """Return a verdict in a few words."""
    if item.verdict == "diverged":
        return describe_divergence(item)
    words = {
        "baseline": "baseline",
        "tied": f"tied with {baseline}",
        "identical": f"the same bits as {baseline}",
        "better": "better",
        "worse": "worse",
    }[item.verdict]
    if item.verdict in ("better", "worse") and item.difference is not None:
        words += f" by {abs(item.difference):.2g} ({item.pairs} pairs)"
    if item.diverged_runs:
        words += f"; {item.diverged_runs} of {item.num_runs} diverged"
    return words


def describe_divergence(item: Standing) -> str:
    """Return which runs of a value have diverged, if none has a last evaluation."""
    if not item.num_runs:
        return f"diverges in all {item.num_trials} trials"
    seeds = f"diverges with all {item.num_runs} fresh seeds"
    return f"{seeds} of its chosen trial" if item.num_trials else seeds


def make_page(
    contest: Contest,
    judged: Sequence[WorkloadStandings],
    scores: Mapping[str, Mapping[str, float]],
) -> Page:
    """Return the page of an arena: verdicts at a glance, steps to the target, then all figures.

    `scores` are AlgoPerf's scores by column and value.
    """
    baseline = contest.baseline
    tuned = f"{contest.trials} trials each" if any(_was_tuned(item) for item in judged) else "as is"
    seeds = contest.final_seeds
    sentences = (
        f"{len(contest.values)} values of {contest.key}, tuned equally ({tuned}), then compared "
        f"with {baseline} over {len(seeds)} fresh seeds. {_describe_bound(judged)} "
        "Tied means that these runs can't tell."
        f"{_describe_growth(contest)}"
    )
    figures = {value: f"{score:.2f}" for value, score in scores[STEP].items()}
    glance: list[Block] = [
        Charts([draw_verdicts(contest, judged)]),
        Legend(LEGEND),
    ]
    steps: list[Block] = [
        Charts([chart for chart in map(draw_steps, judged) if chart is not None], pairs=True)
    ]
    sections = [
        Section("At a glance", f"The last evaluation, against {baseline}.", glance),
        Section(
            "Steps to the target",
            f"Median over seeds and its 95 % interval. The target is what more than half of the "
            f"runs of {baseline} reach at their end.",
            steps if any(item.target is not None for item in judged) else (),
        ),
        *(
            Section(item.workload, _describe_workload(item), [RowTable(_list_rows(contest, item))])
            for item in judged
        ),
    ]
    footer = (
        "Large figures: AlgoPerf's score by steps, 1 for the fastest on every workload. Seconds "
        "and milliseconds are measured beside other runs, and don't repeat; all else does, bit for "
        "bit."
    )
    return Page("arena", f"Arena of {contest.key}", sentences, sections, figures, footer)


def _describe_bound(judged: Sequence[WorkloadStandings]) -> str:
    """Return sentences about what the error of a verdict bounds, and what it doesn't."""
    bound = "in at most 5 % of comparisons, each for itself."
    if not any(_was_tuned(item) for item in judged):
        return f"Each verdict is wrong for equal sides {bound}"
    return (
        "Verdicts are about the tuned settings: they are wrong for settings that are equally good "
        f"{bound} Tuning has one seed, one split and few trials, and their luck isn't in the 5 %: "
        "equal values may get settings that aren't."
    )


def _describe_growth(contest: Contest) -> str:
    """Return a sentence about smaller budgets of the same arena; empty without any."""
    earlier = [f"{item.trials} trials and {item.seeds} seeds" for item in contest.earlier_budgets]
    if not earlier:
        return ""
    text = f" The budget has grown, from {', then '.join(earlier)}."
    if contest.earlier_budgets[0].trials < contest.trials:
        text += (
            " More trials may choose other settings, so who looks at verdicts and then adds trials "
            "compares more often than once, and is wrong more often than said."
        )
    return text


def _was_tuned(item: WorkloadStandings) -> bool:
    return any(standing.num_trials for standing in item.standings)


def _describe_workload(item: WorkloadStandings) -> str:
    if item.target is None:
        base = next(standing for standing in item.standings if standing.value == item.baseline)
        reason = f"diverges with {base.diverged_runs} of {base.num_runs} fresh seeds"
        if base.verdict == "diverged":
            reason = describe_divergence(base)
        return (
            f"{item.metric} after {item.total_steps:,} steps; no target, since {item.baseline} "
            f"{reason}."
        )
    return f"{item.metric} after {item.total_steps:,} steps; the target is {item.target:.4g}."


def _list_rows(contest: Contest, item: WorkloadStandings) -> list[dict[str, Any]]:
    """Return the rows of a workload's table."""
    rows = []
    for standing in item.standings:
        numbers = ", ".join(
            f"{key.rpartition('.')[2]} {number:g}{' (edge)' if key in standing.at_edge else ''}"
            for key, number in (standing.settings or {}).items()
        )
        rows.append(
            {
                contest.key: standing.value,
                MEAN: "" if standing.mean is None else f"{standing.mean:.4g}",
                "verdict": format_verdict(standing, item.baseline),
                "steps to target": ""
                if standing.steps is None
                else format_interval(standing.steps, ".0f"),
                "speed": format_speed(standing),
                "tuned": numbers,
                "s, measured": ""
                if standing.seconds is None
                else format_interval(standing.seconds, ".2g"),
                "ms a step": "" if standing.step_ms is None else f"{standing.step_ms:.2g}",
            }
        )
    return rows


def format_speed(item: Standing) -> str:
    """Return the baseline's steps to the target by the value's, as text."""
    if item.speedup is None:
        return ""
    return f"{item.speedup:.2f}x" if item.speedup else "never"


def draw_verdicts(contest: Contest, judged: Sequence[WorkloadStandings]) -> Drawing:
    """Draw a tile for each value (rows) and workload (columns): the verdict and the speed."""
    letters = max(len(value) for value in contest.values)
    left = min(letters, MOST_LETTERS) * LETTER + 14
    head = max(len(item.workload) for item in judged) * 5.4 + 14
    width = max(left + TILE * len(judged) + 16, 340.0)
    chart = Drawing(width, head + ROW * len(contest.values), "verdicts by workload")
    for column, item in enumerate(judged):
        x = left + TILE * column + TILE / 2
        turn = f"rotate(-60 {x:.6g} {head - 8:.6g})"
        chart.add("text", "ink", item.workload, x=x, y=head - 8, transform=turn)
    for row, value in enumerate(contest.values):
        y = head + ROW * row
        chart.add("text", "ink", _shorten(value), tip=value, x=0, y=y + ROW / 2 + 3)
        for column, item in enumerate(judged):
            standing = next(standing for standing in item.standings if standing.value == value)
            tip = f"{value} on {item.workload}: {format_verdict(standing, item.baseline)}"
            x = left + TILE * column
            chart.add(
                "rect",
                COLOURS[standing.verdict],
                tip=tip,
                x=x,
                y=y,
                width=TILE - 2,
                height=ROW - 2,
                rx=3,
            )
            tone = "ink" if COLOURS[standing.verdict] == "gap" else "light"
            chart.add(
                "text",
                f"{tone} middle",
                MARKS[standing.verdict],
                x=x + TILE / 2 - 1,
                y=y + ROW / 2 + 3,
            )
    return chart


def _shorten(value: str) -> str:
    return value if len(value) <= MOST_LETTERS else f"{value[: MOST_LETTERS - 3]}..."


def draw_steps(item: WorkloadStandings) -> Drawing | None:
    """Draw the steps of each value to the target and their interval; None without a target."""
    if item.target is None:
        return None
    left, right = 112.0, 330.0
    end = float(item.total_steps)
    label = f"steps to the target on {item.workload}"
    chart = Drawing(390, 44 + ROW * len(item.standings), label)
    chart.add("text", "title", item.workload, x=2, y=14)
    bottom = 30 + ROW * len(item.standings)
    for number in (0, item.total_steps // 2, item.total_steps):
        x = left + (right - left) * number / end
        chart.add("line", "rule", x1=x, y1=24, x2=x, y2=bottom)
        chart.add("text", "middle", f"{number:,}", x=x, y=bottom + 13)
    chart.add("text", "middle", "never", x=NEVER, y=bottom + 13)

    def place(steps: float) -> float:
        return NEVER if math.isinf(steps) else left + (right - left) * steps / end

    for row, standing in enumerate(item.standings):
        y = 24 + ROW * row + ROW / 2
        chart.add("text", "ink", _shorten(standing.value), tip=standing.value, x=2, y=y + 4)
        if standing.steps is None:
            tip = f"{standing.value} {describe_divergence(standing)}"
            chart.add("text", "", "diverges", tip=tip, x=left, y=y + 4)
            continue
        low, high = place(standing.steps.low), place(standing.steps.high)
        colour = "slate" if standing.value == item.baseline else "blue"
        tip = f"{standing.value}: {format_interval(standing.steps, '.0f')}"
        chart.add(
            "rect", f"{colour} range", tip=tip, x=low - 2, y=y - 5, width=high - low + 4, height=10
        )
        chart.add("circle", colour, tip=tip, cx=place(standing.steps.median), cy=y, r=4.5)
    return chart
