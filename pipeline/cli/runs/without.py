"""`python -m pipeline without ROWS RUN_DIR`: the run as if some samples weighed nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import RecipeError, UsageError
from pipeline.core.files.value_text import align_columns, count_noun, join_first
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.inspect.replay import Replay, find_last_step, mark, open_replay
from pipeline.inspect.without import (
    Counterfactual,
    compute_counterfactual,
    describe_rows,
    find_positions,
    name_classes,
    parse_rows,
    select_rows,
)

MAX_LISTED = 20
"""Most changed predictions that are printed."""


def main(
    words: Sequence[Path], where: str | None = None, *, approximate: bool = False
) -> CommandResult:
    """Print what changes in the metrics and predictions of a run without some of its samples.

    `words` are the rows and the run, or with the condition `where` on a column, the run alone.
    Raises UsageError for other arguments, DataError if the run can't be read or lacks a row,
    RecipeError if a part of the recipe needs every sample, RunError if the run's bits can't be had.
    """
    text, run_dir = split_words(words, where)
    rows = None if text is None else parse_rows(text)
    with (
        Reporter() as reporter,
        open_replay(run_dir, reporter, approximate=approximate) as replay,
    ):
        opened = replay.opened
        if opened.recipe.privacy is not None:
            raise RecipeError("privacy: must be null for without, whose answer isn't private")
        if opened.recipe.train.callbacks:
            raise RecipeError("train.callbacks: must be [] for without, which calls none")
        split = opened.dataset.train
        if rows is None:
            rows = select_rows(opened.dataset, str(where))
        positions = find_positions(split, rows)
        if len(positions) == len(split):
            raise UsageError([str(where or text)], "are all training samples; must leave some")
        steps = find_last_step(run_dir)
        result = compute_counterfactual(replay, positions, steps)
        lost = tuple(replay.lost)
        has_statistics = bool(jax.tree.leaves(result.state.collections))
        reporter.print_stage("without", mark(lost, describe_rows(np.unique(rows), len(split))))
        names = name_classes(opened.dataset, positions)
        if where is not None and names:
            reporter.print_stage("classes", join_first(names, MAX_LISTED))
        reporter.print_stage("steps", mark(lost, describe_steps(result)))
        for line in format_metrics(result):
            reporter.print_lines(f"  {mark(lost, line)}")
        reporter.print_stage("predictions", mark(lost, describe_changed(result, opened.dataset)))
        for line in format_changed(result, opened.dataset):
            reporter.print_lines(f"  {mark(lost, line)}")
        if has_statistics:
            reporter.print_stage("note", "batches keep the samples, so batch norm still sees them")
        facts = make_facts(result, np.unique(rows), replay)
        facts |= {
            "classes": names,
            "statistics_see_samples": has_statistics,
            "approximate": list(lost),
        }
    return CommandResult(facts)


def split_words(words: Sequence[Path], where: str | None) -> tuple[str | None, Path]:
    """Return the text of rows, None with a condition, and the run. Raises UsageError."""
    arguments = list(map(str, words))
    if where is not None and len(words) == 1:
        return None, words[0]
    if where is None and len(words) == 2:
        return arguments[0], words[1]
    raise UsageError(arguments, "must be ROWS RUN_DIR, or RUN_DIR --where CONDITION")


def describe_steps(result: Counterfactual) -> str:
    """Describe from which step on the run was trained again."""
    if result.first is None:
        return f"none of {result.steps:,} steps read one, so nothing changes"
    share = result.saved_steps / result.steps
    trained = result.steps - result.saved_steps
    return (
        f"step {result.first + 1:,} is the first that read one; {trained:,} of "
        f"{count_noun(result.steps, 'step')} trained again, {share:.1%} saved"
    )


def format_metrics(result: Counterfactual) -> Iterator[str]:
    """Yield lines with the final metrics of both runs."""
    cells = [["metric", "run", "without", "change"]]
    for name, value in result.metrics.items():
        other = result.other_metrics[name]
        change = other - value
        text = f"{change:+.5g}" if math.isfinite(change) else "-"
        cells.append([name, f"{value:.6g}", f"{other:.6g}", text])
    yield from align_columns(cells, right=(1, 2, 3))


def describe_changed(result: Counterfactual, dataset: Dataset) -> str:
    changed = len(result.find_changed())
    total = count_noun(len(dataset.eval), "evaluation sample")
    what = "change" if result.has_classes else "have outputs of other bits"
    return f"{changed:,} of {total} {what}; weights move by {result.measure_distance():.3%}"


def _name_outputs(result: Counterfactual, dataset: Dataset) -> list[str]:
    """Return the names of classes, if each sample has one prediction; else []."""
    is_class = dataset.targets.task == "classification" and result.outputs.ndim == 2
    return list(dataset.classes) if is_class else []


def format_changed(result: Counterfactual, dataset: Dataset) -> Iterator[str]:
    """Yield lines with the classes of samples whose prediction changes."""
    names = _name_outputs(result, dataset)
    changed = result.find_changed()
    if not names or not len(changed):
        return
    rows = dataset.eval.list_rows()
    labels = np.asarray(dataset.eval.columns["label"][changed[:MAX_LISTED]])
    cells = [["sample", "label", "run", "without"]]
    for sample, label in zip(changed[:MAX_LISTED].tolist(), labels.tolist(), strict=True):
        before, after = (
            names[int(outputs[sample].argmax())]
            for outputs in (result.outputs, result.other_outputs)
        )
        # An ignored label is outside the classes.
        text = names[label] if isinstance(label, int) and 0 <= label < len(names) else ""
        cells.append([str(rows[sample]), text, before, after])
    yield from align_columns(cells, right=(0,))
    if len(changed) > MAX_LISTED:
        yield f"... {len(changed) - MAX_LISTED} more; --json has all"


def make_facts(result: Counterfactual, rows: np.ndarray, replay: Replay) -> dict[str, Any]:
    """Return the facts of a counterfactual for JSON."""
    evaluated = replay.opened.dataset.eval.list_rows()
    return {
        "run": str(replay.run_dir),
        "rows": rows.tolist(),
        "steps": result.steps,
        "first_step": None if result.first is None else result.first + 1,
        "saved_steps": result.saved_steps,
        "metrics": dict(result.metrics),
        "metrics_without": dict(result.other_metrics),
        "changed_predictions": evaluated[result.find_changed()].tolist(),
        "weights_moved_by": result.measure_distance(),
    }
