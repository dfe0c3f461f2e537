from __future__ import annotations

import math

import numpy as np
import pytest

optuna = pytest.importorskip("optuna", reason="pip install -e '.[dev]' brings Optuna")

from pipeline.engine.callbacks.callback import SinkReport  # noqa: E402
from pipeline.study.sweep.study import TrialPruner  # noqa: E402
from tests.step_rows import telemetry_of  # noqa: E402


@pytest.mark.parametrize(("metric", "sign"), [("loss", 1), ("accuracy", -1)])
def test_sink_mean_skips_steps_without_a_loss(metric: str, sign: int) -> None:
    """A sink in two chunks; one in which no step has a loss says that."""
    trial = optuna.create_study().ask()
    pruner = TrialPruner(trial, metric, by_evaluations=False)
    for stop, chunks in ((4, ([1.0, math.nan], [math.inf, 2.0])), (6, ([math.nan, math.nan],))):
        for losses in chunks:
            rows = np.array([[loss, 0.1, 1.0, 1.0, 0.0] for loss in losses])
            pruner.on_steps(telemetry_of(stop - len(losses), rows), 0.1)
        pruner.on_sink(SinkReport(stop, 0.0, 0.1, 0.1, stop))
    reported = trial.study.trials[0].intermediate_values
    assert reported[4] == sign * 1.5
    assert math.isnan(reported[6])


def test_poor_trial_is_not_pruned_before_its_share_of_steps() -> None:
    """A quarter of 300 steps; the study would prune every trial at once."""
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.0))
    trial = study.ask()
    pruner = TrialPruner(trial, "loss", by_evaluations=False, warmup_share=0.25)
    pruner.on_length(300)
    reasons = []
    for stop in (25, 50, 75):
        pruner.on_steps(telemetry_of(stop - 25, np.full((25, 5), 2.0)), 0.1)
        pruner.on_sink(SinkReport(stop, 2.0, 0.1, 0.1, 25))
        reasons.append(pruner.prune_reason)
    assert reasons == [None, None, "step 75: mean training loss 2 is poor"]
    assert list(trial.study.trials[0].intermediate_values) == [25, 50, 75]
