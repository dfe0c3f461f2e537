"""Verdict on the two sides of a sweep of pairs, by the results of its jobs, and its page.

The page has pairs, the interval after each pair, and the cost without pairs. A metric must measure
the same in the runs of both recipes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError, printable
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.tree_diff import Difference, TreePath, list_differences
from pipeline.core.files.value_text import join_first, show
from pipeline.core.pages.charts import (
    Curve,
    draw_curves,
    draw_frame,
    format_points,
    make_horizontal_axis,
    make_vertical_axis,
)
from pipeline.core.pages.page import (
    MAX_ROWS,
    Block,
    Charts,
    Drawing,
    Page,
    RowTable,
    Section,
    Words,
    write_page,
)
from pipeline.stages.record.member_runs import find_jobs
from pipeline.study.paired_test import (
    MIN_PAIRS,
    compute_interval,
    count_pairs_to_decide,
    count_unpaired_runs,
)
from pipeline.study.runs.ranking import TRAIN_LOSS, is_larger_better, main_metric
from pipeline.study.sweep.directory import JobSummary, read_overrides, read_summary

Side = Literal["A", "B"]
SIDES: tuple[Side, Side] = ("A", "B")
SWEEPER = "pairs"
"""The sweeper whose directories have a verdict: name of the choice `hydra/sweeper`."""
SHARES = ("accuracy", "top5")
"""Metrics that are the share of the samples that are predicted right."""
TWO_SIDED_95 = 1.96
"""Standard errors on each side of a normal mean that hold 95 %."""
KIND = "better"
TITLE = "Is B better than A?"
MAX_INTERVALS = 60
"""The chart has at most this many intervals, since each takes a search over means."""
TRAINING_DATA = (("dataset", "train"), ("dataset", "exclude"))
"""Keys and sections of data in which sides may differ, since they don't change the evaluation."""
FOLDED_DATA = (("dataset", "train", "select"), ("dataset", "exclude"))
"""Keys of `TRAINING_DATA` that decide which samples are in the fold that is evaluated."""
EVALUATION = (("stages",), ("eval", "samples"), ("eval", "metrics"))
"""Keys and sections that decide what is measured."""
LOSSES = ("loss", TRAIN_LOSS)
MAX_NAMED = 4
"""Most keys by which sides are named."""


@dataclass(frozen=True)
class PairedVerdict:
    """The comparison of side B with side A, over pairs of runs with the same seed."""

    metric: str
    pairs: int
    """Number of pairs in seed order that the verdict is about; later pairs don't count."""
    better: Side | None
    """The better side; None if no difference is found."""
    difference: float
    """Mean of B - A."""
    low: float
    high: float
    """Ends of the 95 % interval of the mean; infinite with fewer than `MIN_PAIRS` pairs."""
    is_identical: bool
    """Whether all metrics of both sides are equal in all pairs."""
    unpaired_runs: int | None
    """Runs with separate seeds for the same precision; None if all differences are equal."""
    samples: int | None
    """Number of predictions of the evaluation split; None if the metric isn't a share of them."""
    split_error: float | None
    """Half of the 95 % interval of the metric on other samples like these, binomial."""

    @property
    def is_final(self) -> bool:
        """Whether no further pair is needed."""
        return self.better is not None or (self.is_identical and self.pairs >= MIN_PAIRS)

    @property
    def largest_plausible(self) -> float:
        """The largest difference that isn't excluded; for a share, at least 1 / `samples`."""
        return max(abs(self.low), abs(self.high), 1 / self.samples if self.samples else 0.0)

    @property
    def is_limited_by_split(self) -> bool:
        """Whether the evaluation split is too small for a difference of this size."""
        size = self.largest_plausible if self.better is None else abs(self.difference)
        return self.split_error is not None and size < self.split_error

    def __str__(self) -> str:
        pairs = "1 pair" if self.pairs == 1 else f"{self.pairs} pairs"
        if self.is_identical and self.pairs:
            return f"the difference is exactly 0 in all metrics after {pairs}: keep A"
        if math.isinf(self.largest_plausible):
            return f"no verdict after {pairs}: it takes at least {MIN_PAIRS}"
        unpaired = ""
        if self.unpaired_runs is not None:
            unpaired = f"; unpaired it would have taken {self.unpaired_runs} runs"
        if self.better is None:
            head = (
                f"no difference above {self.largest_plausible:.2g} in {self.metric} after {pairs}"
            )
            return f"{head}: keep A{unpaired}"
        low, high = sorted((abs(self.low), abs(self.high)))
        head = f"{self.better} is better by {abs(self.difference):.2g} in {self.metric}"
        keep = ": keep A" if self.better == "A" else ""
        return f"{head} (95 %: {low:.2g} to {high:.2g}) after {pairs}{keep}{unpaired}"

    def describe_split(self) -> str | None:
        """Return a line if the evaluation split, not the number of pairs, limits the verdict."""
        if self.is_identical or not self.is_limited_by_split:
            return None
        return (
            f"the evaluation split is the limit: its {self.samples:,} samples leave {self.metric} "
            f"uncertain by {self.split_error:.2g} (95 %, binomial), which more pairs don't change"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the facts for JSON; an infinite end of the interval is null."""
        ends = {"low": self.low, "high": self.high}
        finite = {name: end if math.isfinite(end) else None for name, end in ends.items()}
        return {
            "verdict": str(self),
            **vars(self),
            **finite,
            "is_limited_by_split": self.is_limited_by_split,
        }


def read_verdict(sweep_dir: Path, metric: str | None) -> PairedVerdict | str:
    """Return the verdict of a sweep's finished pairs, or the reason why it can't be given.

    `metric` is compared; None is the main metric of the first pair. Raises RunError if a job lacks
    the metric, if it isn't finite, or if the sides evaluated different numbers of samples, and
    DataError if a job's files can't be read.
    """
    pairs_by_seed, failure = read_pairs(sweep_dir)
    pairs = list(pairs_by_seed.values())
    if not pairs:
        return failure or "no verdict: no pair is done"
    metric = metric or main_metric([pairs[0][0].numbers()])
    if metric is None:
        raise RunError(f"{sweep_dir}: its jobs have no metric; the stages train and eval have some")
    for pair in pairs:
        for summary in pair:
            numbers = summary.numbers()
            if metric in summary.metrics and metric not in numbers:
                problem = f"{metric} of a run isn't a finite number, so there is no verdict"
                raise RunError(f"{sweep_dir}: {problem}")
            if metric not in numbers:
                problem = explain_unknown_name("metric of these runs", metric, numbers)
                raise RunError(f"--metric {metric}: {problem}")
    if metric != TRAIN_LOSS:
        _require_equal_counts(pairs, sweep_dir)
    verdict = judge_pairs(pairs, metric)
    return failure if failure and not verdict.is_final else verdict


def read_pairs(sweep_dir: Path) -> tuple[dict[int, tuple[JobSummary, JobSummary]], str | None]:
    """Return the results of sides A and B by seed, of all pairs before the first that isn't done.

    The text is the reason why that pair failed; None if it hasn't failed.
    """
    jobs: dict[tuple[int, Side], Path] = {}
    for job_dir in find_jobs(sweep_dir):
        changed = read_overrides(job_dir) or {}
        seed = changed.get("seed")
        side = changed.get("side")
        if isinstance(seed, int) and side in SIDES:
            jobs[seed, side] = job_dir
    pairs: dict[int, tuple[JobSummary, JobSummary]] = {}
    for seed in sorted({seed for seed, _ in jobs}):
        folders = {side: jobs[seed, side] for side in SIDES if (seed, side) in jobs}
        summaries = {side: read_summary(folder) for side, folder in folders.items()}
        for side, summary in summaries.items():
            if summary is not None and summary.status == "failed":
                job = f"job {printable(folders[side].name)} (side {side}, seed {seed})"
                return pairs, f"no verdict: {job} failed: {printable(str(summary.reason))}"
        done = [summary for summary in summaries.values() if summary and summary.status == "done"]
        if len(done) < len(SIDES):
            break
        pairs[seed] = (done[0], done[1])
    return pairs, None


def _require_equal_counts(pairs: Sequence[tuple[JobSummary, JobSummary]], sweep_dir: Path) -> None:
    """Raise RunError if the sides of a pair were evaluated on different numbers of samples."""
    for pair in pairs:
        counts = [summary.numbers().get("count") for summary in pair]
        if counts[0] != counts[1]:
            numbers = " and ".join(f"{count:,.0f}" for count in counts if count is not None)
            raise RunError(
                f"{sweep_dir}: its sides were evaluated on {numbers} samples; must be equal: set "
                "eval.samples=all"
            )


def judge_pairs(pairs: Sequence[tuple[JobSummary, JobSummary]], metric: str) -> PairedVerdict:
    """Return the verdict on the first pairs that decide, or on all pairs if none do."""
    sides = np.array([[summary.numbers()[metric] for summary in pair] for pair in pairs])
    differences = sides[:, 1] - sides[:, 0]
    num_deciding = count_pairs_to_decide(differences)
    count = num_deciding or len(pairs)
    low, high = compute_interval(differences[:count])
    better: Side | None = None
    if num_deciding is not None:
        better = "B" if (low > 0) == is_larger_better(metric) else "A"
    samples, split_error = _compute_split_error(pairs[0][0].numbers(), metric, sides[:count])
    return PairedVerdict(
        metric=metric,
        pairs=count,
        better=better,
        difference=float(differences[:count].mean()),
        low=low,
        high=high,
        is_identical=all(a.metrics == b.metrics for a, b in pairs[:count]),
        unpaired_runs=count_unpaired_runs(sides[:count, 0], sides[:count, 1]),
        samples=samples,
        split_error=split_error,
    )


def _compute_split_error(
    numbers: Mapping[str, float], metric: str, values: np.ndarray
) -> tuple[int | None, float | None]:
    """Return the number of predictions, and half of the binomial 95 % interval of the metric.

    Both are None if the metric isn't a share. `values` are the metric's values in all runs.
    """
    if metric not in SHARES or "count" not in numbers:
        return None, None
    samples = int(numbers["count"])
    share = float(values.mean())
    return samples, TWO_SIDED_95 * math.sqrt(share * (1 - share) / samples)


@dataclass(frozen=True)
class SideTexts:
    """Sentences about sides A and B."""

    contrast: str
    """The values that differ, which is at the top of the page."""
    arguments: str
    """The arguments of both, which are at the end."""


def write_verdict_page(
    path: Path,
    verdict: PairedVerdict | str,
    pairs: Mapping[int, tuple[JobSummary, JobSummary]],
    sides: SideTexts,
) -> None:
    """Write the page of a verdict, or of the reason why it can't be given.

    `pairs` are the results of sides A and B by seed. Raises RunError if the file can't be written.
    """
    if isinstance(verdict, PairedVerdict):
        page = _make_verdict_page(verdict, pairs, sides)
    else:
        page = Page(KIND, TITLE, f"{sides.contrast}. Result: {verdict}.", footer=sides.arguments)
    write_page(path, page)


def _make_verdict_page(
    verdict: PairedVerdict, pairs: Mapping[int, tuple[JobSummary, JobSummary]], sides: SideTexts
) -> Page:
    metric = verdict.metric
    # Pairs after the one that decides don't count.
    seeds = list(pairs)[: verdict.pairs]
    values = np.array([[summary.numbers()[metric] for summary in pairs[seed]] for seed in seeds])
    differences = values[:, 1] - values[:, 0]
    figures = {"pairs": f"{verdict.pairs}", "mean of B - A": f"{verdict.difference:.3g}"}
    if math.isfinite(verdict.low):
        figures["95 %"] = f"{verdict.low:.2g} to {verdict.high:.2g}"
    figures["runs"] = f"{2 * verdict.pairs}"
    if verdict.unpaired_runs is not None:
        figures["runs if unpaired"] = f"{verdict.unpaired_runs:,}"
    curves = [
        Curve(side, np.array(seeds), values[:, column], marked=True)
        for column, side in enumerate(SIDES)
    ]
    charts = [_draw_running_interval(differences), draw_curves(metric, curves, "seed")]
    rows = [
        {"seed": str(seed), "A": float(a), "B": float(b), "B - A": float(b - a)}
        for seed, (a, b) in zip(seeds, values, strict=True)
    ]
    shown = f"The first {MAX_ROWS} of {len(rows):,}" if len(rows) > MAX_ROWS else "All"
    sections = [
        Section(
            "After each pair",
            "Dots are the pairs, the line is the mean so far; bars are its 95 % intervals, from "
            f"pair {MIN_PAIRS} on. The test may stop after any pair.",
            [Charts([chart for chart in charts if chart is not None], pairs=True)],
        ),
        Section("Without pairs", "", _describe_unpaired(verdict, values)),
        Section("Pairs", f"{shown} pairs that the verdict is about.", [RowTable(rows)]),
    ]
    about = ". ".join(
        filter(None, [f"{sides.contrast}. Result: {verdict}", verdict.describe_split()])
    )
    return Page(KIND, TITLE, f"{about}.", sections, figures, sides.arguments)


def _describe_unpaired(verdict: PairedVerdict, values: np.ndarray) -> Sequence[Block]:
    """Return a table of the runs that are needed with and without common seeds."""
    if verdict.pairs < 2:
        return [Words("A single pair has no spread.")]
    if verdict.unpaired_runs is None:
        return [Words("All differences are equal, so that no number of separate seeds compares.")]
    common_std = float((values[:, 1] - values[:, 0]).std())
    separate_std = math.hypot(*values.std(axis=0))
    error = common_std / math.sqrt(verdict.pairs)
    columns = ("seeds of A and B", "standard deviation of B - A", "runs")
    cells = [
        ("common", common_std, 2 * verdict.pairs),
        ("separate", separate_std, verdict.unpaired_runs),
    ]
    rows = [dict(zip(columns, row, strict=True)) for row in cells]
    about = f"Runs for a mean of B - A with a standard error of {error:.2g}."
    return [Words(about), RowTable(rows)]


def _draw_running_interval(differences: np.ndarray) -> Drawing:
    """Draw the mean of the first n differences, float64 (pairs,), and its interval, over n."""
    pairs = len(differences)
    counts = range(1, pairs + 1)
    means = np.cumsum(differences) / np.array(counts)
    num_ends = min(MAX_INTERVALS, max(0, pairs - MIN_PAIRS + 1))
    ends = np.linspace(MIN_PAIRS, pairs, num_ends, dtype=int)
    bounds = np.array([compute_interval(differences[:end]) for end in ends]).reshape(-1, 2)
    reached = np.concatenate([means, differences, bounds.ravel(), [0.0]])
    margin = 0.05 * float(np.ptp(reached)) or 0.5
    x = make_horizontal_axis(0.5, pairs + 0.5)
    y = make_vertical_axis(float(reached.min()) - margin, float(reached.max()) + margin)
    chart = draw_frame("B - A", x, y, "pairs")
    chart.add("line", "ideal", x1=x.begin, y1=y.to_pixel(0), x2=x.end, y2=y.to_pixel(0))
    for end, (low, high) in zip(ends.tolist(), bounds, strict=True):
        place = x.to_pixel(end)
        chart.add(
            "line", "dot curve blue", x1=place, y1=y.to_pixel(low), x2=place, y2=y.to_pixel(high)
        )
    places = zip(map(x.to_pixel, counts), map(y.to_pixel, means), strict=True)
    chart.add("polyline", "curve blue", points=format_points(places))
    for count, value in zip(counts, differences, strict=True):
        tip = f"pair {count}: {value:.4g}"
        chart.add("circle", "dot blue", tip=tip, cx=x.to_pixel(count), cy=y.to_pixel(value), r=2.6)
    return chart


def require_comparable(recipe: Recipe, other: Recipe, metric: str | None) -> None:
    """Raise RecipeError if a key of side B changes what the metric measures, or if none differs."""
    changes = list_differences(other.model_dump(mode="json"), recipe.model_dump(mode="json"))
    if not changes:
        raise RecipeError("side B: has the recipe of side A; must differ in a key")
    problems = [
        f"{change} on side A; {reason}"
        for change in changes
        if (reason := _explain_refusal(change, recipe, metric)) is not None
    ]
    if problems:
        raise RecipeError(problems)


def describe_contrast(recipe: Recipe, other: Recipe) -> str:
    """Return the values that differ between side A and side B as a sentence, at most `MAX_NAMED`.

    Passwords are hidden.
    """
    changes = list_differences(other.model_dump(mode="json"), recipe.model_dump(mode="json"))
    side_a = [f"{change.key}={show(change.other_value)}" for change in changes]
    side_b = [f"{change.key}={show(change.value)}" for change in changes]
    return f"A has {join_first(side_a, MAX_NAMED)}; B has {join_first(side_b, MAX_NAMED)}"


def _explain_refusal(change: Difference, recipe: Recipe, metric: str | None) -> str | None:
    """Return the reason why sides can't differ in a key; None if they can."""
    path = change.path
    if path[-1] == "seed":
        return "must be equal: each pair has the same seed on both sides"
    if path[0] == "dataset" and not _is_below(path, TRAINING_DATA):
        return "must be equal: both sides are evaluated on the same samples"
    if recipe.dataset.folds is not None and _is_below(path, FOLDED_DATA):
        return "must be equal with dataset.folds: the fold would have other samples"
    if _is_below(path, EVALUATION):
        return "must be equal: both sides are measured in the same way"
    if metric in LOSSES and _is_below(path, (("train", "loss"),)):
        return f"must be equal with --metric {metric}, which would be two different losses"
    return None


def _is_below(path: TreePath, sections: Sequence[TreePath]) -> bool:
    return any(path[: len(section)] == section for section in sections)
