"""The sweepers that `hydra/sweeper=grid`, the default, and `hydra/sweeper=optuna` mean.

Hydra takes sweepers from this namespace only, and imports all of it whenever it starts, also for
other programs: so what they do lies in `pipeline.sweep` and is imported when it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.types import TaskFunction
from omegaconf import DictConfig


class GridSweeper(BasicSweeper):
    """Every combination, as Hydra's basic sweeper makes them, but what is done already."""

    def setup(self, *, hydra_context: Any, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the task, which knows what had failed, beside what Hydra keeps."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._task: Any = task_function

    def sweep(self, arguments: Sequence[str]) -> None:
        """Run what is left to do."""
        from pipeline.sweep.grid import sweep_grid

        sweep_grid(self, self._task, arguments)


class StudySweeper(BasicSweeper):
    """Trials that Optuna chooses. What is asked of it lies in `hydra.sweeper`."""

    def __init__(self, params: Any = None, **_: Any) -> None:
        super().__init__(None, params)

    def sweep(self, arguments: Sequence[str]) -> None:
        """Run what is left to do. Raises RunError where Optuna is not installed."""
        from pipeline.errors import RunError

        try:
            from pipeline.sweep.trials import sweep_study
        except ModuleNotFoundError as error:
            package = "pip install 'recipe-pipeline[sweep]'"
            raise RunError(f"hydra/sweeper=optuna: {error}; {package}") from error
        sweep_study(self, arguments)
