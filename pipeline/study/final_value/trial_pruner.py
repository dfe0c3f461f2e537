"""The pruner `estimate` of a study: ends a trial that will hardly be better than the best one."""

from __future__ import annotations

import optuna
from optuna.trial import FrozenTrial, TrialState

from pipeline.study.final_value.learning_curves import LearningCurve, choose_scale, thin, to_errors
from pipeline.study.final_value.run_estimate import CurveWatch, format_chance


class EstimatePruner(optuna.pruners.BasePruner):
    """Pruner that extrapolates the values that a trial has reported, and compares them with the
    trials that are complete. It prunes nothing before three are."""

    total: int = 0
    """Steps of the whole trial, which the trial sets."""
    reason: str | None = None
    """Text about the last decision to prune; None for the default text."""

    def __init__(self, chance: float = 0.05) -> None:
        if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 < chance < 1:
            raise ValueError(f"chance = {chance}: must be a number above 0 and below 1")
        self._least_chance = chance

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Return whether the chance that the trial will be the best is too small."""
        step = trial.last_step
        if step is None or step >= self.total:
            return False
        metric = str(study.user_attrs["metric"])
        watch = CurveWatch(metric, self.total)
        watch.note(trial.intermediate_values)
        complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        curves = [_read_trial(finished, metric) for finished in complete]
        done = [curve for curve in curves if curve is not None]
        chance = watch.judge(done, step, self._least_chance)
        if chance is None or chance >= self._least_chance:
            return False
        text = f"{metric} better than the study's best so far"
        self.reason = f"the chance of {text} is {format_chance(chance)}"
        return True


def _read_trial(trial: FrozenTrial, metric: str) -> LearningCurve | None:
    """Return the curve of a complete trial; None for one that reported nothing, as in a history."""
    if not trial.intermediate_values:
        return None
    points = dict(sorted(trial.intermediate_values.items()))
    total = max(points)
    shares, values = thin(list(points), list(points.values()), total, metric)
    if not len(shares) or shares[-1] < 1:
        return None
    errors = to_errors(values, choose_scale(metric, values.tolist()))
    return LearningCurve(str(trial.number), shares, errors)
