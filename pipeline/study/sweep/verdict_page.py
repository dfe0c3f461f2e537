"""Page of a comparison: its pairs, the interval after each pair, and the cost without pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
from pipeline.study.paired_test import MIN_PAIRS, compute_interval
from pipeline.study.sweep.directory import JobSummary
from pipeline.study.sweep.verdict import SIDES, PairedVerdict

KIND = "better"
TITLE = "Is B better than A?"
MAX_INTERVALS = 60
"""The chart has at most this many intervals, since each takes a search over means."""


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
