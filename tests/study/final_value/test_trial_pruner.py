from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

optuna = pytest.importorskip("optuna", reason="pip install -e '.[dev]' brings Optuna")

from hydra.utils import instantiate  # noqa: E402

from pipeline.core.errors import RecipeError  # noqa: E402
from pipeline.core.files.paths import CONF  # noqa: E402
from pipeline.engine.callbacks.callback import Evaluation  # noqa: E402
from pipeline.study.final_value.trial_pruner import EstimatePruner  # noqa: E402
from pipeline.study.sweep.study import TrialPruner, read_settings  # noqa: E402
from tests.study.final_value.test_grid_pruner import GOOD, POOR  # noqa: E402

SWEEPER = CONF / "hydra" / "sweeper"


def make_study(complete: int) -> Any:
    settings = OmegaConf.load(SWEEPER / "pruner" / "estimate.yaml")
    study = optuna.create_study(direction="maximize", pruner=instantiate(settings))
    assert isinstance(study.pruner, EstimatePruner)
    study.set_user_attr("metric", "accuracy")
    for _ in range(complete):
        trial = study.ask()
        for number, value in enumerate(GOOD, start=1):
            trial.report(float(value), 10 * number)
        study.tell(trial, float(GOOD[-1]))
    return study


def feed(study: Any, values: np.ndarray) -> list[str | None]:
    pruner = TrialPruner(study.ask(), "accuracy", by_evaluations=True)
    pruner.on_length(200)
    reasons = []
    for number, value in enumerate(values, start=1):
        pruner.on_eval(10 * number, Evaluation({"accuracy": float(value), "count": 9}, None))
        reasons.append(pruner.prune_reason)
    return reasons


def test_trial_that_will_not_be_the_best_is_pruned() -> None:
    study = make_study(3)
    reasons = feed(study, POOR)
    assert reasons[:4] == [None] * 4
    assert reasons[9] == (
        "step 100: the chance of accuracy better than the study's best so far is below 1 %"
    )
    assert set(feed(study, GOOD + 0.01)) == {None}


def test_nothing_is_pruned_before_three_trials_are_complete() -> None:
    assert set(feed(make_study(2), POOR)) == {None}


def test_settings_that_the_pruner_cannot_use_are_refused(tmp_path: Path) -> None:
    """It extrapolates the metric, so the training loss of sinks says nothing of an accuracy."""
    tree = OmegaConf.to_container(OmegaConf.load(SWEEPER / "optuna.yaml"))
    assert isinstance(tree, dict)
    parts = {
        "sampler": OmegaConf.load(SWEEPER / "sampler" / "tpe.yaml"),
        "pruner": OmegaConf.load(SWEEPER / "pruner" / "estimate.yaml"),
    }
    with pytest.raises(RecipeError, match="sinks: must be evaluations with pruner=estimate"):
        read_settings({**tree, **parts}, tmp_path)
    assert read_settings({**tree, **parts, "reports": "evaluations"}, tmp_path)
    assert read_settings({**tree, **parts, "metric": "train_loss"}, tmp_path)
    with pytest.raises(ValueError, match="chance = 2: must be a number above 0 and below 1"):
        EstimatePruner(chance=2)
