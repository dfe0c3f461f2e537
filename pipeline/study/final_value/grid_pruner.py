"""The pruner `estimate` of a grid: ends a job that will hardly be better than the sweep's best."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import list_event_periods
from pipeline.core.errors import RecipeError
from pipeline.engine.callbacks.callback import Evaluation, Pruner
from pipeline.engine.schedule import Event
from pipeline.stages.record.member_runs import find_jobs
from pipeline.study.final_value.learning_curves import read_own_curves
from pipeline.study.final_value.run_estimate import CurveWatch, format_chance


class GridPruner(Pruner):
    """Monitor of a job that compares its expected end with the jobs of the sweep that are done.

    It ends nothing before three jobs are done.
    """

    prune_reason: str | None = None
    """Reason to end the run after the last evaluation; None while it should continue."""

    def __init__(self, job_dir: Path, watch: CurveWatch, least_chance: float) -> None:
        self._job_dir = job_dir
        self._watch = watch
        self._least_chance = least_chance

    def on_length(self, total: int) -> None:
        self._watch.on_length(total)

    def on_rollback(self, step: int, to: int) -> None:
        self._watch.on_rollback(step, to)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Note the metric, and decide."""
        self._watch.on_eval(step, evaluation)
        self.prune_reason = None
        if self._watch.metric is None or step >= self._watch.total:
            return
        done = read_own_curves(find_jobs(self._job_dir.parent), self._watch.metric)
        chance = self._watch.judge(done, step, self._least_chance)
        if chance is not None and chance < self._least_chance:
            text = f"{self._watch.metric} better than the sweep's best so far"
            self.prune_reason = f"step {step}: the chance of {text} is {format_chance(chance)}"


def open_grid_pruner(job_dir: Path, recipe: Recipe, least_chance: float) -> GridPruner:
    """Return the pruner of a job. Raises RecipeError if training doesn't evaluate."""
    if not any(list_event_periods(recipe, 1)[Event.EVALUATE]):
        problem = "needs evaluations during training; add eval.every_steps or eval.every_epochs"
        raise RecipeError([f"hydra/sweeper/pruner = estimate: {problem}"])
    watch = CurveWatch(None, 1)
    watch.read_logs(job_dir)
    return GridPruner(job_dir, watch, least_chance)
