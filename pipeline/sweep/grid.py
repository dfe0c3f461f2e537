"""A grid: every combination of the values that its command lists."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher

from pipeline.config.compose import swept_keys
from pipeline.sweep.jobs import Job, values_of
from pipeline.sweep.plan import PlannedJob, compose_job, enter, run_all


def sweep_grid(sweeper: BasicSweeper, task: Job, arguments: Sequence[str]) -> None:
    """Run what is left to do of a grid. Raises RunError where its directory holds another sweep."""
    assert sweeper.config is not None
    assert sweeper.launcher is not None
    sweep_dir = Path(str(sweeper.config.hydra.sweep.dir))
    jobs = plan_grid(sweeper, arguments)
    enter(sweep_dir, jobs, arguments)
    run_all(jobs, task.failures, partial(launch, sweeper.launcher, sweeper.max_batch_size))


def plan_grid(sweeper: BasicSweeper, arguments: Sequence[str]) -> list[PlannedJob]:
    """The jobs of a grid, the last key varying fastest."""
    assert sweeper.hydra_context is not None
    assert sweeper.config is not None
    given = [*arguments, *(f"{key}={value}" for key, value in sweeper.params.items())]
    swept = swept_keys(given)
    parsed = OverridesParser.create().parse_overrides(given)
    (combinations,) = BasicSweeper.split_arguments(parsed, None)
    loader = sweeper.hydra_context.config_loader
    return [
        compose_job(loader, sweeper.config, number, overrides, values_of(overrides, swept))
        for number, overrides in enumerate(combinations)
    ]


def launch(
    launcher: Launcher, max_batch_size: int | None, jobs: Sequence[PlannedJob]
) -> list[JobReturn]:
    """Have a launcher start jobs, at most so many at once, and wait for them.

    One that takes them one after the other anyway is given single ones, each under its number.
    """
    size = 1 if isinstance(launcher, BasicLauncher) else max_batch_size or len(jobs)
    returns: list[JobReturn] = []
    for start in range(0, len(jobs), size):
        batch = jobs[start : start + size]
        placed = [job.placed for job in batch]
        returns += launcher.launch(placed, initial_job_idx=batch[0].number)
    return returns
