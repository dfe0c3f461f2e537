"""Grid sweep: every combination of the values in the command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.config.hydra_options import BasicSweeper
from pipeline.config.overrides import list_swept_keys
from pipeline.core.errors import RecipeError
from pipeline.study.population.groups import group_recipes, require_population
from pipeline.study.sweep.directory import make_command
from pipeline.study.sweep.jobs import Job, read_least_chance
from pipeline.study.sweep.plan import PlannedJob, enter_jobs, plan_jobs, run_all
from pipeline.study.sweep.vectorized import choose_launch, read_places

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
