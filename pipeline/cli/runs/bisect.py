"""`python -m pipeline bisect GOOD BAD`: the keys, or the rows, that make two runs differ."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.cli.commands.command import CommandResult
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RunError, UsageError, printable
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.value_text import count_noun, join_first
from pipeline.core.reporter import Reporter
from pipeline.data.batch import Batch
from pipeline.engine.monitors.log_lines import METRICS
from pipeline.inspect.bisect import (
    FirstSteps,
    PairedMetric,
    find_smallest,
    list_changes,
    without_seed,
)
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe, open_run_recipe
from pipeline.inspect.replay import (
    describe_changed_data,
    list_changed_causes,
    list_changed_environment,
    list_unrepeated_parts,
    read_step_ms,
)
from pipeline.inspect.step.step_report import place_samples
from pipeline.stages.record.continuity import is_fork
from pipeline.stages.record.run_directory import RECIPE, describe_missing_run, read_status
from pipeline.stages.record.run_record import Discrepancy, compare_steps
from pipeline.stages.record.trained_run import read_run_recipe, spare_gpus
from pipeline.study.paired_test import MIN_PAIRS
from pipeline.study.runs.ranking import directions

Over = Literal["keys", "rows", "versions"]
MAX_NAMED = 10


def main(
    good: Path, bad: Path, over: Over = "keys", metric: str | None = None, pairs: int = 8
) -> CommandResult:
    """Print the smallest set of keys that gives GOOD the first differing step of BAD, to the bit,
    or the rows in which the data of that step differ; or the keys by which a metric is worse; or
    whether versions, code and machine make the difference.

    Raises UsageError for an unknown metric, or one of rows or versions; DataError if a run can't be
    read, if the runs don't differ, if both failed, if rows can't be compared or, for versions,
    unless exactly one run was trained here; RunError if a run doesn't repeat its own bits here.
    """
    if metric is not None and (over != "keys" or metric not in directions()):
        rule = f"is about keys, not {over}" if over != "keys" else ""
        rule = rule or explain_unknown_name("metric", metric, directions())
        raise UsageError([f"--metric {metric}"], rule)
    for run_dir in (good, bad):
        if not (run_dir / RECIPE).is_file():
            raise DataError(describe_missing_run(run_dir))
        if not (run_dir / METRICS).is_file():
            raise DataError(f"{run_dir}: has no {METRICS}, so no step can be compared")
    first = _find_first(good, bad)
    with Reporter() as reporter:
        reporter.print_stage("differ", f"first at {first}")
        if over == "rows":
            return _compare_rows(good, bad, first, reporter)
        if over == "versions":
            return _compare_environments(good, bad, first, reporter)
        if metric is not None:
            return _search_by_metric(good, bad, metric, pairs, reporter)
        return _search_keys(good, bad, first, reporter)


def _find_first(good: Path, bad: Path) -> Discrepancy:
    """Return the first number that differs. Raises DataError if none does, or if both failed."""
    if read_status(good) == read_status(bad) == "failed":
        raise DataError(f"{good} and {bad}: both failed, so neither is the good one")
    first = compare_steps(good / METRICS, bad / METRICS).first
    if first is None:
        problem = "all steps that both have are the same, bit for bit"
        raise DataError(f"{good} and {bad}: {problem}; nothing to search")
    return first


def _search_keys(good: Path, bad: Path, first: Discrepancy, reporter: Reporter) -> CommandResult:
    for run_dir in (good, bad):
        if is_fork(run_dir):
            problem = "is a fork, whose first steps had the keys of another run"
            advice = "its provenance.json names the changed ones, and --metric searches whole runs"
            raise DataError(f"{run_dir}: {problem}; {advice}")
    spare_gpus(good)
    recipes: list[Recipe] = [read_run_recipe(run_dir) for run_dir in (good, bad)]
    changes = list_changes(*recipes)
    if not changes:
        causes = list_changed_causes(open_run_recipe(bad), bad)
        reason = join_first(causes, MAX_NAMED) if causes else "nothing that it recorded"
        text = f"no key that decides steps differs; since {bad} was trained changed: {reason}"
        advice = f"--over rows compares their data, and `diff {good} {bad}` versions and machines"
        raise DataError(f"{good} and {bad}: {text}; {advice}")
    runs = 2 + 2 * math.ceil(math.log2(len(changes))) + 2
    text = f"{count_noun(len(changes), 'change')}; for two keys about {runs} runs of the first "
    text += count_noun(first.step, "step")
    step_ms = read_step_ms(good)
    if step_ms is not None:
        text += f", {first.step * step_ms / 1000:.2g} s each by the run's times, after compiling"
    reporter.print_stage("search", text)
    steps = FirstSteps(good, bad, recipes[0], recipes[1], first.step)
    with reporter.clock("repeating both runs"):
        for run_dir, mixed, outcome in ((good, [], "good"), (bad, changes, "bad")):
            if steps.probe(mixed) != outcome:
                promise = "doesn't repeat its own first steps here, so mixtures can't be compared"
                raise RunError(f"{run_dir}: {promise}; `reproduce {run_dir}` says what differs")
    with reporter.clock("running mixtures"):
        smallest = find_smallest(changes, steps.probe)
    for change in smallest:
        reporter.print_stage("key", printable(change.text))
    verdict = (
        f"{good} with {count_noun(len(smallest), 'change')} of {len(changes)} has the numbers of "
        f"{bad} up to step {first.step:,}, to the bit; {steps.num_runs} runs"
    )
    reporter.print_stage("verdict", verdict)
    facts = {
        "step": first.step,
        "first": str(first),
        "changes": len(changes),
        "keys": [change.text for change in smallest],
        "runs": steps.num_runs,
    }
    return CommandResult(facts)


def _search_by_metric(
    good: Path, bad: Path, metric: str, pairs: int, reporter: Reporter
) -> CommandResult:
    """Search the keys by which a metric is worse, by whole runs of several seeds."""
    spare_gpus(good)
    recipes: list[Recipe] = [read_run_recipe(run_dir) for run_dir in (good, bad)]
    changes = without_seed(list_changes(*recipes))
    if not changes:
        raise DataError(f"{good} and {bad}: no key that decides steps differs, but for the seed")
    paired = PairedMetric(recipes[0], recipes[1], metric, pairs)
    count = count_noun(len(changes), "change")
    text = f"{count}, each mixture by whole runs of up to {max(pairs, MIN_PAIRS)} seeds"
    reporter.print_stage("search", text)
    with reporter.clock("comparing both runs"):
        low, high = paired.measure(changes)
    text = f"{metric} of {bad} is worse by {low:.2g} to {high:.2g} (95 %)"
    if not math.isfinite(low):
        text = f"{bad} fails, so mixtures that fail are searched"
    reporter.print_stage("metric", text)
    with reporter.clock("comparing mixtures"):
        smallest = find_smallest(changes, paired.probe)
    for change in smallest:
        reporter.print_stage("key", printable(change.text))
    uncertain = paired.num_uncertain
    note = f", {uncertain} undecided after all pairs, by their mean" if uncertain else ""
    comparisons = count_noun(paired.num_comparisons, "comparison")
    effect = f"at least half of what {bad} loses" if math.isfinite(low) else "enough to fail"
    verdict = f"{count_noun(len(smallest), 'change')} of {len(changes)}: {effect}; "
    reporter.print_stage("verdict", f"{verdict}{comparisons}{note}")
    facts = {
        "metric": metric,
        "worse_by": [low, high] if math.isfinite(low) else None,
        "changes": len(changes),
        "keys": [change.text for change in smallest],
        "comparisons": paired.num_comparisons,
        "undecided": uncertain,
    }
    return CommandResult(facts)


def _compare_environments(
    good: Path, bad: Path, first: Discrepancy, reporter: Reporter
) -> CommandResult:
    """Train the first steps of the run from elsewhere here, where the other one was trained, and
    print whether versions, code, machine and settings make its numbers."""
    spare_gpus(good)
    causes = [
        list_changed_environment(open_run_recipe(run_dir), run_dir) for run_dir in (good, bad)
    ]
    if not any(causes) or all(causes):
        which = "neither run was" if all(causes) else "both runs were"
        text = f"{which} trained with the versions, code and machine of here"
        advice = f"one must be; `diff {good} {bad}` names all differences"
        raise DataError(f"{good} and {bad}: {text}; {advice}")
    elsewhere = good if causes[0] else bad
    if parts := list_unrepeated_parts(elsewhere):
        reason = join_first(parts, MAX_NAMED)
        raise DataError(f"{elsewhere}: its first steps can't be trained again: {reason}")
    recipes: list[Recipe] = [read_run_recipe(run_dir) for run_dir in (good, bad)]
    changes = list_changes(*recipes)
    steps = FirstSteps(good, bad, recipes[0], recipes[1], first.step)
    with reporter.clock(f"repeating {elsewhere} here"):
        outcome = steps.probe(changes if elsewhere == bad else [])
    expected = "good" if elsewhere == good else "bad"
    listed = causes[0] or causes[1]
    if outcome == "other" and not changes:
        promise = "doesn't repeat its own first steps here, so nothing can be compared"
        raise RunError(f"{bad if elsewhere == good else good}: {promise}")
    if outcome == expected:
        verdict = f"{elsewhere} has the same numbers here, so its keys or data differ"
    elif changes and outcome == "other":
        verdict = (
            f"{elsewhere} has other numbers here, and not those of the other run: keys and these"
        )
    else:
        verdict = f"{elsewhere} has the other run's numbers here: one or more of these"
    if outcome != expected:
        for cause in listed:
            reporter.print_stage("elsewhere", printable(cause))
    reporter.print_stage("verdict", verdict)
    facts = {
        "step": first.step,
        "first": str(first),
        "elsewhere": str(elsewhere),
        "outcome": outcome,
        "causes": listed if outcome != expected else [],
    }
    return CommandResult(facts)


def _compare_rows(good: Path, bad: Path, first: Discrepancy, reporter: Reporter) -> CommandResult:
    """Print the rows that the first differing step reads, and that differ between the data."""
    opened = [_open_with_data(run_dir) for run_dir in (good, bad)]
    if any(side.dataset.table is not None for side in opened):
        problem = "a table's rows are encoded by statistics of all rows, so each would differ"
        raise DataError(f"{good} and {bad}: {problem}; `diff {good} {bad}` names columns")
    batches = [side.batch(first.step - 1) for side in opened]
    rows = _find_differing_rows(batches[0], batches[1], f"{good} and {bad}")
    places = [
        place_samples(side.dataset.train, batch)
        for side, batch in zip(opened, batches, strict=True)
    ]
    if not rows:
        problem = f"the rows of step {first.step:,} are equal in both"
        raise DataError(f"{good} and {bad}: {problem}; --over keys searches the recipes")
    facts = [
        {"row": places[0][row][0], "good": places[0][row][1], "bad": places[1][row][1]}
        for row in rows
    ]
    for fact in facts:
        reporter.print_stage("row", printable(f"{fact['row']}: {fact['good']} -> {fact['bad']}"))
    count = count_noun(len(rows), "row")
    reporter.print_stage("verdict", f"{count} of step {first.step:,} differ, and no earlier step")
    return CommandResult({"step": first.step, "first": str(first), "rows": facts})


def _open_with_data(run_dir: Path) -> OpenedRecipe:
    opened = open_run_recipe(run_dir)
    if change := describe_changed_data(opened, run_dir):
        raise DataError(f"{run_dir}: {change}")
    return opened


def _find_differing_rows(one: Batch, other: Batch, subject: str) -> list[int]:
    """Return the positions of samples that differ. Raises DataError for batches of other samples
    or columns."""
    samples = [np.asarray(batch.sample)[: int(batch.count)] for batch in (one, other)]
    is_comparable = (
        np.array_equal(samples[0], samples[1]) and one.columns.keys() == other.columns.keys()
    )
    if not is_comparable:
        problem = "their batches have other samples or columns, so rows can't be compared"
        raise DataError(f"{subject}: {problem}; --over keys searches the recipes")
    differing = set()
    for name, column in one.columns.items():
        left, right = np.asarray(column), np.asarray(other.columns[name])
        for row in range(len(samples[0])):
            if left[row].tobytes() != right[row].tobytes():
                differing.add(row)
    return sorted(differing)
