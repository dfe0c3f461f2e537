"""`python -m pipeline arena`: which optimizer, or value of a key, is best if tuned equally?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.cli.commands.command import CommandResult
from pipeline.config.overrides import get_key
from pipeline.core.errors import UsageError, printable
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.host.signals import watch_signals
from pipeline.core.registry import list_components
from pipeline.stages.record.run_directory import create_run_dir
from pipeline.study.arena.arena_page import (
    MEAN,
    format_interval,
    format_speed,
    format_verdict,
    write_results,
)
from pipeline.study.arena.contest import (
    DEFAULT_OPTIMIZERS,
    KEPT,
    OPTIMIZER,
    SHIPPED,
    Contest,
    Workload,
    choose_baseline,
    is_in_section,
    make_custom_workload,
    parse_searches,
    parse_values,
    require_values,
)
from pipeline.study.arena.contest_runs import hold_arena, run_heat
from pipeline.study.arena.standings import WorkloadStandings, judge_heat
from pipeline.study.runs.ranking import TRAIN_LOSS, directions


@dataclass(frozen=True)
class ArenaOptions:
    """Options of the command, as typed."""

    optimizers: Sequence[str]
    key: str | None
    values: str | None
    baseline: str | None
    workloads: Sequence[str]
    search: Sequence[str]
    metric: str | None
    tune_on: str
    trials: int
    seeds: int
    seed: int
    out: Path | None


def main(overrides: Sequence[str], **typed: Any) -> CommandResult:
    """Tune each value equally, compare them on fresh seeds, and print and write the table.

    Raises UsageError for wrong options, RecipeError for a wrong recipe, DataError for data that
    can't be read or split, and RunError if a run fails by another cause than its numbers.
    """
    with watch_signals():
        return _run_arena(overrides, ArenaOptions(**typed))


def _run_arena(overrides: Sequence[str], options: ArenaOptions) -> CommandResult:
    contest = make_contest(overrides, options)
    _check_recipes(contest)
    folder = options.out or create_run_dir("arena")
    with hold_arena(folder, contest) as contest:
        heats = []
        judged: list[WorkloadStandings] = []
        for workload in contest.workloads:
            heats.append(run_heat(contest, workload, folder))
            judged.append(judge_heat(heats[-1], contest.baseline))
            _print_standings(contest, judged[-1])
        facts = write_results(folder, contest, heats, judged)
    for line in facts["summary"]:
        print(printable(line))
    print(printable(f"the page: {folder / 'arena.html'}"))
    return CommandResult({**facts, "folder": str(folder)})


def _check_recipes(contest: Contest) -> None:
    """Raise RecipeError for a wrong recipe before the first run.

    A recipe takes an eighth of a second, so not all trials are composed: the first one of a value,
    and for each key of --search those with the least and the largest number, since rules about
    numbers are bounds.
    """
    searched = {item.key for _, item in contest.searches}
    for workload in contest.workloads:
        for value in contest.values:
            trials = contest.list_trials(workload, value)
            contest.compose(workload, value, trials[0], contest.final_seeds[0])
            checked = [trials[0]]
            for key in searched & trials[0].keys():
                checked += [choose(trials, key=itemgetter(key)) for choose in (min, max)]
            for numbers in checked:
                contest.compose(workload, value, numbers, contest.tuning_seed, is_trial=True)


def make_contest(overrides: Sequence[str], options: ArenaOptions) -> Contest:
    """Return what the options declare. Raises UsageError or RecipeError."""
    typed = OPTIMIZER if options.key is None else options.key
    # The key without a prefix such as ++, which a key that the recipe lacks needs in an override.
    bare_key = get_key(f"{typed}=")
    key = OPTIMIZER if bare_key == OPTIMIZER else typed
    if (options.key is None) != (options.values is None):
        words = f"--values {options.values}" if options.key is None else f"--key {options.key}"
        raise UsageError([words], "must be given together: --key KEY --values A,B")
    if not bare_key:
        raise UsageError([f"--key {typed}"], "must be a key of the recipe, such as model.dropout")
    if options.key is not None and options.optimizers:
        raise UsageError(["--optimizers", "--key"], "must not be given together")
    if any(is_in_section(bare_key, [item]) or is_in_section(item, [bare_key]) for item in KEPT):
        raise UsageError([f"--key {typed}"], "must be another key: arena sets it")
    if options.values is not None:
        values = parse_values(f"--values {options.values}", key, options.values)
    else:
        values = tuple(options.optimizers or DEFAULT_OPTIMIZERS)
    option = "--optimizers" if options.values is None else "--values"
    if key == OPTIMIZER:
        _require_optimizers(values, option)
    if any(get_key(item) == bare_key for item in overrides):
        raise UsageError([bare_key], "is what arena compares; must not be among the recipe's keys")
    require_values(option, values)
    return Contest(
        key=key,
        values=values,
        baseline=choose_baseline(key, values, options.baseline),
        workloads=_choose_workloads(overrides, options),
        trials=options.trials,
        num_seeds=options.seeds,
        seed=options.seed,
        searches=parse_searches(options.search, key, values),
        tunes_on_fold=options.tune_on == "fold",
    )


def _require_optimizers(values: Sequence[str], option: str) -> None:
    """Raise UsageError, about an option, for a value that isn't an optimizer."""
    optimizers = list_components("optimizer")
    for value in values:
        if value not in optimizers:
            problem = explain_unknown_name("optimizer", value, optimizers)
            raise UsageError([f"{option} {value}"], problem)


def _choose_workloads(overrides: Sequence[str], options: ArenaOptions) -> tuple[Workload, ...]:
    """Return the user's recipe, or the shipped workloads."""
    metrics = directions().keys() - {TRAIN_LOSS}
    if options.metric is not None and options.metric not in metrics:
        problem = explain_unknown_name("metric", options.metric, metrics)
        raise UsageError([f"--metric {options.metric}"], problem)
    if overrides:
        if options.workloads:
            raise UsageError(["--workloads"], "must not be given with a recipe")
        return (make_custom_workload(overrides, options.metric),)
    if options.metric is not None:
        raise UsageError([f"--metric {options.metric}"], "must be given with a recipe")
    shipped = {workload.name: workload for workload in SHIPPED}
    for name in options.workloads:
        if name not in shipped:
            problem = explain_unknown_name("workload", name, shipped)
            raise UsageError([f"--workloads {name}"], problem)
    return tuple(shipped[name] for name in options.workloads or shipped)


def _print_standings(contest: Contest, judged: WorkloadStandings) -> None:
    """Print the table of a workload."""
    target = "no target" if judged.target is None else f"target {judged.target:.4g}"
    title = f"{judged.workload}: {judged.metric} after {judged.total_steps:,} steps, {target}"
    table = Table(title=printable(title), box=SIMPLE_HEAD, padding=(0, 1), title_justify="left")
    for name in (contest.key, MEAN, "verdict", "steps to target (95 %)", "speed", "s, measured"):
        table.add_column(printable(name), justify="left" if name == contest.key else "right")
    for item in judged.standings:
        seconds = "" if item.seconds is None else format_interval(item.seconds, ".2g")
        table.add_row(
            printable(item.value),
            "" if item.mean is None else f"{item.mean:.4g}",
            format_verdict(item, judged.baseline),
            "" if item.steps is None else format_interval(item.steps, ".0f"),
            format_speed(item),
            seconds,
        )
    Console(markup=False).print(table)
