from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline import run
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.engine.callbacks.callback import Evaluation
from pipeline.study.final_value.learning_curves import LearningCurve
from pipeline.study.final_value.run_estimate import (
    CurveWatch,
    FinalValue,
    describe_final_value,
)

ESTIMATE = "run_features=[estimate]"
EVERY_5 = ("train.steps=45", "eval.every_steps=5")
LINE = (
    r"estimate +accuracy [\d.e-]+ at the end \(80 %: [\d.e-]+ to [\d.e-]+; from shipped curves and "
    r"0 done runs of the recipe, fewer than 3\)"
)


def feed(watch: CurveWatch, values: list[float]) -> None:
    for number, value in enumerate(values, start=1):
        watch.on_eval(10 * number, Evaluation({"accuracy": value, "count": 9}, None))


@pytest.mark.mlp
def test_time_line_has_the_final_value(
    tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feature changes no bit of the run, and leaves no file."""
    monkeypatch.chdir(tmp_path)
    plain, estimated = tmp_path / "plain", tmp_path / "estimated"
    run(tiny(*EVERY_5), plain)
    run(tiny(*EVERY_5, ESTIMATE), estimated)
    lines = [line for line in (estimated / "run.log").read_text().splitlines() if "80 %" in line]
    # 9 evaluations; the first interval is after the third one, and none after the last.
    assert len(lines) == 6
    assert all(re.search(LINE, line) for line in lines)
    for log in ("metrics.jsonl", "evals.jsonl"):
        assert (plain / log).read_bytes() == (estimated / log).read_bytes()
    assert not (estimated / "estimate.json").exists()


@pytest.mark.mlp
def test_few_evaluations_leave_the_training_loss(
    tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(
        tiny("train.steps=45", "train.sink_size=5", "eval.every_steps=20", ESTIMATE), tmp_path / "a"
    )
    text = (tmp_path / "a" / "run.log").read_text()
    assert re.search(r"estimate +train_loss [\d.e-]+ at the end", text)


def test_run_without_the_feature_loads_nothing_of_it() -> None:
    """The list of features and the registry know names alone."""
    program = (
        "import sys; from pipeline import load_recipe; load_recipe('lenet5_digits');"
        "import pipeline.stages.run; print([m for m in sys.modules if 'final_value' in m])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("metric: acuracy", "metric = acuracy: there is no such metric; did you mean accuracy"),
        ("metric: accuracy", "metric = accuracy: isn't logged during training"),
        ("runs: nowhere", "run_features (estimate).runs = nowhere: must be a folder of runs"),
    ],
)
@pytest.mark.mlp
def test_wrong_setting_is_refused_in_one_message(
    tiny: Callable[..., Recipe], tmp_path: Path, keys: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)) as error:
        run(tiny(f"run_features=[{{name: estimate, {keys}}}]", "eval.every_epochs=null"), tmp_path)
    assert len(error.value.problems) == 1


def test_metric_that_is_not_logged_is_named() -> None:
    watch = CurveWatch("f1", 100)
    with pytest.raises(DataError, match=r"^f1 isn't logged: evaluations have accuracy; add it"):
        feed(watch, [0.5])


def test_interval_says_how_many_runs_it_is_from() -> None:
    value = FinalValue(40, "accuracy", 0.9, 0.95, 0.97, 2)
    assert str(value) == (
        "accuracy 0.95 at the end (80 %: 0.9 to 0.97; from shipped curves and 2 done runs of the "
        "recipe, fewer than 3)"
    )
    sweep = FinalValue(40, "accuracy", 0.9, 0.95, 0.97, 3, best=0.96, chance=0.004)
    assert str(sweep).endswith("0.97); better than the sweep's best, 0.96: below 1 %")


def test_estimate_is_in_units_of_the_metric_and_compares_with_the_best() -> None:
    """A curve that is at 0.5 after half of the run isn't expected to be better than 0.99."""
    watch = CurveWatch(None, 100)
    feed(watch, [0.3, 0.4, 0.45, 0.48, 0.5])
    shares = np.array([0.5, 1.0])
    done = [LearningCurve(f"job {n}", shares, np.log([0.4, 0.015])) for n in range(3)]
    estimated = watch.estimate(done, 50)
    assert estimated is not None
    value = describe_final_value("accuracy", 50, *estimated, done, in_sweep=True)
    assert 0 <= value.low <= value.middle <= value.high <= 1
    assert value.best == pytest.approx(0.99)
    assert value.chance is not None
    assert value.chance < 0.5
    assert describe_final_value("accuracy", 50, *estimated, done, in_sweep=False).best is None


def test_resumed_run_and_rollback_know_the_points_so_far(tmp_path: Path) -> None:
    watch = CurveWatch(None, 100)
    feed(watch, [0.3, 0.4, 0.5, 0.6])
    lines = [{"step": 10 * n, "accuracy": 0.2 + n / 10, "count": 9} for n in (1, 2, 3, 4)]
    (tmp_path / "evals.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    resumed = CurveWatch(None, 100)
    resumed.read_logs(tmp_path)

    def median(curve: CurveWatch, step: int) -> float:
        estimated = curve.estimate([], step)
        assert estimated is not None
        return estimated[0].quantile(0.5)

    assert resumed.metric == "accuracy"
    assert median(resumed, 40) == pytest.approx(median(watch, 40))
    assert resumed.estimate([], 20) is None
    watch.on_rollback(41, 30)
    assert median(watch, 40) == pytest.approx(median(resumed, 30))


def test_estimate_takes_less_than_50_ms_an_evaluation() -> None:
    """By a wide margin on a machine that others use: processor time of this thread."""
    watch = CurveWatch(None, 1000)
    feed(watch, list(np.linspace(0.1, 0.9, 50)))
    watch.estimate([], 500)
    began = time.thread_time()
    for _ in range(5):
        watch.estimate([], 500)
    assert (time.thread_time() - began) / 5 < 0.05
