"""Sweeps without a study: a grid of all combinations of the values in the command, and pairs of two
sides over the same seeds, until one is better or the budget is used.

Pair i has the seed of the recipe plus i, so both sides start with the same weights if their shapes
agree, and have the same order of samples, crops and dropout. What varies with the seed is common to
both sides of a pair, and cancels in their difference.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.config.hydra_options import BasicSweeper
from pipeline.config.overrides import get_key, list_swept_keys
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.study.paired_test import MIN_PAIRS
from pipeline.study.population.groups import (
    group_recipes,
    list_member_problems,
    require_members,
    require_population,
)
from pipeline.study.runs.ranking import directions
from pipeline.study.sweep.directory import make_command, resolve_sweeper
from pipeline.study.sweep.jobs import Job, count_jobs_at_once, count_processors, read_least_chance
from pipeline.study.sweep.plan import (
    Launch,
    PlannedJob,
    compose_job,
    enter_jobs,
    plan_jobs,
    run_all,
)
from pipeline.study.sweep.vectorized import Places, choose_launch, read_places
from pipeline.study.sweep.verdict import SIDES, PairedVerdict, read_verdict, require_comparable

SHARE = "hydra.sweeper.share"


def sweep_grid(sweeper: BasicSweeper, task: Job, overrides: Sequence[str]) -> None:
    """Run the unfinished jobs of a grid.

    Raises RunError if its directory has another sweep. With `vectorize`, raises RecipeError if a
    job can't be in a population, or if no two jobs can share a program.
    """
    assert sweeper.config is not None
    command = make_command(sweeper.config.hydra, overrides)
    places = read_places(sweeper)
    shares = _reads_sharing(sweeper)
    if read_least_chance(sweeper.config.hydra.sweeper) is not None and shares:
        raise RecipeError([f"{SHARE} = true: must be false with hydra/sweeper/pruner=estimate"])
    if shares and places is not None:
        raise RecipeError([f"{SHARE} = true: must be false with hydra.sweeper.vectorize"])
    jobs = plan_grid(sweeper, command.arguments, with_recipes=shares or places is not None)
    if places is not None:
        recipes = {job.folder.name: job.recipe for job in jobs if job.recipe is not None}
        require_population(recipes, group_recipes(recipes))
    if shares:
        # Imported here, since few sweeps share steps.
        from pipeline.study.sweep.shared_steps import open_sharing

        sharing = open_sharing(sweeper, jobs)
        enter_jobs(Path(str(sweeper.config.hydra.sweep.dir)), jobs, command)
        sharing.print_plan()
        run_all(jobs, task.failures, sharing)
        sharing.close()
        return
    enter_jobs(Path(str(sweeper.config.hydra.sweep.dir)), jobs, command)
    run_all(jobs, task.failures, choose_launch(sweeper, task, places))


def _reads_sharing(sweeper: BasicSweeper) -> bool:
    """Return whether jobs share steps. Raises RecipeError for a value that isn't true or false."""
    assert sweeper.config is not None
    setting = sweeper.config.hydra.sweeper.get("share", False)
    if not isinstance(setting, bool):
        raise RecipeError([f"{SHARE} = {setting}: must be true or false"])
    return setting


def plan_grid(
    sweeper: BasicSweeper, arguments: Sequence[str], *, with_recipes: bool
) -> list[PlannedJob]:
    """Plan the jobs of a grid; the last key varies fastest."""
    swept = list_swept_keys(arguments)
    parsed = OverridesParser.create().parse_overrides(list(arguments))
    (combinations,) = BasicSweeper.split_arguments(parsed, None)
    return plan_jobs(sweeper, combinations, swept, with_recipes=with_recipes)


SEED = "seed"
MAX_PAIRS = 1_000


@dataclass(frozen=True)
class PairsSettings:
    """Settings of a sweep of pairs."""

    other: tuple[str, ...]
    """All overrides of side B."""
    metric: str | None
    """The metric to compare; None for the main metric of the runs."""
    pairs: int
    """At most this many pairs are run."""
    minutes: float | None
    """Minutes after which no further pair starts; None for no limit."""


def read_settings(sweeper: Mapping[str, Any]) -> PairsSettings:
    """Read the settings from a configuration. Raises RecipeError with every problem."""
    other = tuple(map(str, sweeper["other"]))
    metric = sweeper["metric"]
    pairs = sweeper["pairs"]
    minutes = sweeper["minutes"]
    problems = []
    if not other:
        problems.append(
            "hydra.sweeper.other = []: must have all overrides of side B; the command `better` "
            "makes them"
        )
    problems += [
        f"{key}: has several values on side B; must have one" for key in list_swept_keys(other)
    ]
    if metric is not None and metric not in directions():
        problem = explain_unknown_name("metric", str(metric), directions())
        problems.append(f"hydra.sweeper.metric = {metric}: {problem}")
    if not isinstance(pairs, int) or not MIN_PAIRS <= pairs <= MAX_PAIRS:
        rule = f"must be a whole number from {MIN_PAIRS}, the fewest that decide, to {MAX_PAIRS:,}"
        problems.append(f"hydra.sweeper.pairs = {pairs}: {rule}")
    if minutes is not None and not (isinstance(minutes, int | float) and minutes > 0):
        problems.append(f"hydra.sweeper.minutes = {minutes}: must be a number above 0, or null")
    if problems:
        raise RecipeError(problems)
    return PairsSettings(other, metric, pairs, minutes)


def sweep_pairs(sweeper: BasicSweeper, task: Job, overrides: Sequence[str]) -> None:
    """Run pairs in waves, until one decides or the budget is used.

    Raises RecipeError for wrong settings, RunError if the directory has another sweep.
    """
    started_at = time.monotonic()
    assert sweeper.config is not None
    settings = read_settings(resolve_sweeper(sweeper.config.hydra))
    command = make_command(sweeper.config.hydra, overrides)
    sweep_dir = Path(str(sweeper.config.hydra.sweep.dir))
    jobs = plan_pairs(sweeper, command.arguments, settings)
    # The recipes of sides A and B. An invalid one is missing; its job fails, and the sweep ends.
    recipes = [job.recipe for job in jobs[: len(SIDES)] if job.recipe is not None]
    start, count_at_once = _choose_start(sweeper, task, recipes)
    pairs_at_once = max(1, count_at_once // len(SIDES))
    # A wave are the pairs from `begin` to `end`. `MIN_PAIRS` are needed for a verdict, so the first
    # wave has at least as many unless time is limited.
    end = pairs_at_once if settings.minutes else max(MIN_PAIRS, pairs_at_once)
    begin = 0
    longest_s = 0.0
    while begin < settings.pairs:
        wave_started_at = time.monotonic()
        left_s = (settings.minutes or float("inf")) * 60 - (wave_started_at - started_at)
        if begin and left_s < longest_s:
            print(f"pairs      no time for another pair: {left_s:.0f} s are left", flush=True)
            return
        wave = jobs[len(SIDES) * begin : len(SIDES) * min(end, settings.pairs)]
        enter_jobs(sweep_dir, wave, command, is_whole_grid=False)
        run_all(wave, task.failures, start)
        longest_s = max(longest_s, time.monotonic() - wave_started_at)
        verdict = read_verdict(sweep_dir, settings.metric)
        if not isinstance(verdict, PairedVerdict):
            return
        require_comparable(recipes[0], recipes[1], verdict.metric)
        if verdict.is_final:
            return
        print(
            f"pairs      {verdict.pairs} of {settings.pairs}: B - A is {verdict.low:.2g} to "
            f"{verdict.high:.2g} in {verdict.metric}",
            flush=True,
        )
        begin = end
        end += pairs_at_once


def plan_pairs(
    sweeper: BasicSweeper, arguments: Sequence[str], settings: PairsSettings
) -> list[PlannedJob]:
    """Plan all pairs: jobs 2 i and 2 i + 1 are sides A and B of pair i.

    Raises RecipeError if a key has several values.
    """
    if swept := list_swept_keys(arguments):
        raise RecipeError([f"{key}: has several values; must have one" for key in swept])
    first_seed = int(compose_job(sweeper, arguments)[SEED])
    combinations = []
    for seed in range(first_seed, first_seed + settings.pairs):
        for side in (arguments, settings.other):
            unseeded = [item for item in side if get_key(item) != SEED]
            combinations.append([*unseeded, f"{SEED}={seed}"])
    jobs = plan_jobs(sweeper, combinations, [SEED], with_recipes=True)
    return [
        replace(job, changed={"side": SIDES[job.number % len(SIDES)], **job.changed})
        for job in jobs
    ]


def _choose_start(
    sweeper: BasicSweeper, task: Job, recipes: Sequence[Recipe]
) -> tuple[Launch, int]:
    """Return the function that starts jobs, and the number of jobs that run at once.

    Jobs share a program if the recipes allow it. Raises RecipeError if `vectorize` is set by the
    user but the recipes don't allow it.
    """
    assert sweeper.config is not None
    hydra_config = sweeper.config.hydra
    if hydra_config.sweeper.vectorize == "auto":
        is_basic = hydra_config.runtime.choices.get("hydra/launcher") == "basic"
        can_share = is_basic and not list_member_problems(recipes)
        places = Places(count_processors()) if can_share else None
    elif (places := read_places(sweeper)) is not None:
        require_members(recipes)
    at_once = places.count if places else count_jobs_at_once(hydra_config.launcher, len(SIDES))
    return choose_launch(sweeper, task, places), at_once
