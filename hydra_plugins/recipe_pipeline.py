"""The sweepers of `hydra/sweeper=grid`, the default, `hydra/sweeper=optuna` and `pairs`.

Hydra finds sweepers in this namespace only, and imports all of it at every start, also in other
programs. So their code is in `pipeline.study.sweep` and imported only when a sweep runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.types import TaskFunction
from omegaconf import DictConfig


class GridSweeper(BasicSweeper):
    """Every combination of values, as in Hydra's basic sweeper, except finished jobs."""

    def __init__(self, max_batch_size: int | None = None, params: Any = None, **_: Any) -> None:
        super().__init__(max_batch_size, params)

    def setup(self, *, hydra_context: Any, task_function: TaskFunction, config: DictConfig) -> None:
        """Also keep the task, which knows the jobs that failed before."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._task: Any = task_function

    def sweep(self, arguments: Sequence[str]) -> None:
        """Run the unfinished jobs."""
        from pipeline.study.sweep.grid import sweep_grid

        sweep_grid(self, self._task, arguments)


class PairsSweeper(GridSweeper):
    """Two sides over the same seeds, until one is better or the budget is used."""

    def sweep(self, arguments: Sequence[str]) -> None:
        """Run pairs of jobs."""
        from pipeline.study.sweep.grid import sweep_pairs

        sweep_pairs(self, self._task, arguments)


class StudySweeper(GridSweeper):
    """Trials that Optuna chooses, with the settings of `hydra.sweeper`."""

    def sweep(self, arguments: Sequence[str]) -> None:
        """Run the remaining trials. Raises RunError where Optuna is not installed."""
        from pipeline.core.errors import RunError

        try:
            from pipeline.study.sweep.trials import sweep_study
        except ModuleNotFoundError as error:
            package = "pip install 'recipe-pipeline[sweep]'"
            raise RunError(f"hydra/sweeper=optuna: {error}; {package}") from error
        sweep_study(self, self._task, arguments)
