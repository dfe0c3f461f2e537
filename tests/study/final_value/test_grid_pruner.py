from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.__main__ import main
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.engine.callbacks.callback import Evaluation
from pipeline.study.final_value.grid_pruner import open_grid_pruner
from pipeline.study.sweep.jobs import ESTIMATE_PRUNER, NO_PRUNER, read_least_chance
from tests.conftest import MLP, TINY

GOOD = 1 - 0.6 * np.arange(1, 21) ** -1.0
"""Accuracies of 20 evaluations that end at 0.97."""
POOR = np.linspace(0.1, 0.2, 20)


def make_job(sweep_dir: Path, number: int, values: np.ndarray, status: str = "done") -> Path:
    job_dir = sweep_dir / str(number)
    job_dir.mkdir()
    (job_dir / "overrides.yaml").write_text("seed: 1\n")
    lines = [{"step": 10 * n, "accuracy": float(v)} for n, v in enumerate(values, start=1)]
    (job_dir / "evals.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    summary = {"status": status, "steps": 200, "metrics": {"accuracy": float(values[-1])}}
    (job_dir / "summary.json").write_text(json.dumps(summary))
    return job_dir


@pytest.fixture
def judge(tiny: Callable[..., Recipe], tmp_path: Path) -> Callable[[np.ndarray], list[str | None]]:
    """Reasons to end a job with these accuracies, after each evaluation."""
    job_dir = tmp_path / "9"
    job_dir.mkdir()
    (job_dir / "overrides.yaml").write_text("seed: 1\n")

    def feed(values: np.ndarray) -> list[str | None]:
        pruner = open_grid_pruner(job_dir, tiny("eval.every_steps=10"), 0.05)
        pruner.on_length(200)
        reasons = []
        for number, value in enumerate(values, start=1):
            pruner.on_eval(10 * number, Evaluation({"accuracy": float(value), "count": 9}, None))
            reasons.append(pruner.prune_reason)
        return reasons

    return feed


def test_job_that_will_not_be_the_best_is_ended(
    judge: Callable[[np.ndarray], list[str | None]], tmp_path: Path
) -> None:
    """A chance must be low at three points, of which the first has three values."""
    for number in range(3):
        make_job(tmp_path, number, GOOD)
    reasons = judge(POOR)
    assert reasons[:4] == [None] * 4
    assert reasons[9] is not None
    assert reasons[9].startswith("step 100: the chance of accuracy better than the sweep's best so")
    assert reasons[-1] is None
    assert set(judge(GOOD + 0.01)) == {None}


def test_nothing_is_ended_before_three_jobs_are_done(
    judge: Callable[[np.ndarray], list[str | None]], tmp_path: Path
) -> None:
    for number in range(2):
        make_job(tmp_path, number, GOOD)
    make_job(tmp_path, 2, GOOD[:8], status="pruned")
    assert set(judge(POOR)) == {None}


def test_grid_has_no_other_pruner() -> None:
    assert read_least_chance({"pruner": {"_target_": NO_PRUNER}}) is None
    assert read_least_chance({"pruner": {"_target_": ESTIMATE_PRUNER, "chance": 0.1}}) == 0.1
    with pytest.raises(RecipeError, match="must be estimate or none; others compare trials"):
        read_least_chance({"pruner": {"_target_": "optuna.pruners.MedianPruner"}})
    for chance in (0, 1, True, "much"):
        with pytest.raises(RecipeError, match=r"pruner\.chance = .*: must be a number above 0"):
            read_least_chance({"pruner": {"_target_": ESTIMATE_PRUNER, "chance": chance}})


def test_run_without_evaluations_has_no_pruner(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="pruner = estimate: needs evaluations during training"):
        open_grid_pruner(tmp_path, tiny("eval.every_epochs=null"), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("vectorize", ["false", "1"])
def test_sweep_ends_poor_jobs_and_keeps_the_best(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    vectorize: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pipeline"])
    grid = [
        *(*TINY, "+recipe=lenet5_digits", *MLP, "train.epochs=null", "train.steps=90"),
        *("train.sink_size=5", "eval.every_epochs=null", "eval.every_steps=5"),
        *("train.optimizer.lr=0.02,0.03,0.04,1e-6,1e-7", "hydra.sweep.dir=mine"),
        *(f"hydra.sweeper.vectorize={vectorize}", f"cache.root={cache}"),
    ]
    assert main(["-m", *grid, "hydra/sweeper/pruner=estimate"]) == 0
    with (tmp_path / "mine" / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["done"] * 3 + ["pruned"] * 2
    assert all(int(row["steps"]) < 60 for row in rows[3:])
    # The same command does nothing.
    assert main(["-m", *grid, "hydra/sweeper/pruner=estimate"]) == 0
    capsys.readouterr()
    assert main(["-m", *grid, "hydra/sweeper/pruner=median"]) == 2
    assert "must be estimate or none" in capsys.readouterr().err
