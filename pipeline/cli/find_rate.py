"""`python -m pipeline find-rate +recipe=NAME ...`: the learning rate to start with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from pipeline.cli.commands.command import CommandResult
from pipeline.config.compose import compose_and_check
from pipeline.config.recipe import Recipe
from pipeline.core.pages.charts import Curve, draw_curves
from pipeline.core.pages.page import Charts, Drawing, Page, Section, write_page
from pipeline.core.reporter import Reporter
from pipeline.study.rate_search import RateCurve, RateSuggestion, measure_rate_curve, suggest_rate

NUM_SHOWN = 12
"""Number of rates in the printed table."""


def main(overrides: Sequence[str], steps: int, out: Path | None = None) -> CommandResult:
    """Search for a learning rate, print a suggestion, and draw the losses on the page `out`.

    Raises RecipeError for a wrong recipe, RunError if the loss doesn't fall at any rate or
    the page can't be written.
    """
    recipe = compose_and_check(overrides)
    with Reporter() as reporter:
        curve = measure_rate_curve(recipe, steps, reporter)
        suggestion = suggest_rate(curve)
        reporter.print_lines(f"\n{format_table(curve)}\n\n{suggestion}")
        advice = _format_advice(suggestion.rate, recipe)
        reporter.print_lines(f"try {advice}")
        if out is not None:
            chart = draw_rate_curve(curve, suggestion)
            charts = [] if chart is None else [Charts([chart])]
            about = f"Losses of {steps:,} steps, and their average: {suggestion}."
            sections = [Section("Loss by learning rate", about, charts)]
            title = f"Learning rates of {recipe.name}"
            write_page(out, Page("find-rate", title, f"Try {advice}", sections))
            reporter.print_lines(f"the curve: {out}")
    losses = {"rates": curve.rates.tolist(), "losses": curve.losses.tolist()}
    return CommandResult({**asdict(suggestion), **losses})


def _format_advice(rate: float, recipe: Recipe) -> str:
    """Return the keys with which the learning rate is `rate`."""
    optimizer = recipe.train.optimizer
    lr = optimizer.unscale_rate(rate, recipe.train.batch_size)
    base = optimizer.base_batch
    scaled = "" if base is None else f" train.optimizer.lr_for_batch={base}"
    return f"train.optimizer.lr={lr:.2g}{scaled}"


def draw_rate_curve(curve: RateCurve, suggestion: RateSuggestion) -> Drawing | None:
    """Draw the losses over the rates of a search, and mark the rates of the suggestion.

    None if fewer than two losses are finite.
    """
    marks = {suggestion.lowest_at: "lowest"}
    if suggestion.diverges_at is not None:
        marks[suggestion.diverges_at] = "diverges"
    marks[suggestion.rate] = f"suggested: {suggestion.rate:.2g}"
    curves = [
        Curve("average", curve.rates, curve.smoothed),
        Curve("each step", curve.rates, curve.capped),
    ]
    return draw_curves("loss", curves, "learning rate", is_logarithmic=True, marks=marks)


def format_table(curve: RateCurve) -> str:
    """Return a table of evenly spaced steps: their rates and averaged losses."""
    steps = np.linspace(0, len(curve.rates) - 1, min(NUM_SHOWN, len(curve.rates)), dtype=int)
    smoothed = curve.smoothed
    lines = ["      rate       loss"]
    lines += [f"{curve.rates[step]:10.2g} {smoothed[step]:10.4g}" for step in steps]
    return "\n".join(lines)
