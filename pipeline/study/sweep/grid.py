"""A grid: every combination of the values that its command lists."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.config.overrides import swept_keys
from pipeline.study.sweep.command import command_of
from pipeline.study.sweep.jobs import Job
from pipeline.study.sweep.plan import PlannedJob, enter, plan_jobs
from pipeline.study.sweep.run_pending import Launch, launch, run_all
from pipeline.study.sweep.vectorized import places_asked, vectorized


def sweep_grid(sweeper: BasicSweeper, task: Job, overrides: Sequence[str]) -> None:
    """Run the unfinished jobs of a grid. Raises RunError where its directory has another sweep."""
    assert sweeper.config is not None
    assert sweeper.launcher is not None
    command = command_of(sweeper.config.hydra, overrides)
    vectorize = places_asked(sweeper)
    jobs = plan_grid(sweeper, command.arguments, with_recipes=vectorize is not None)
    start: Launch = partial(launch, sweeper.launcher, sweeper.max_batch_size)
    if vectorize is not None:
        start = vectorized(sweeper, task, jobs, vectorize, start)
    enter(Path(str(sweeper.config.hydra.sweep.dir)), jobs, command)
    run_all(jobs, task.failures, start)


def plan_grid(
    sweeper: BasicSweeper, arguments: Sequence[str], *, with_recipes: bool = False
) -> list[PlannedJob]:
    """The jobs of a grid, the last key varying fastest."""
    swept = swept_keys(arguments)
    parsed = OverridesParser.create().parse_overrides(list(arguments))
    (combinations,) = BasicSweeper.split_arguments(parsed, None)
    return plan_jobs(sweeper, combinations, swept, with_recipes=with_recipes)
