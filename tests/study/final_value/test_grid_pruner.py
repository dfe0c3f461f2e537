from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.__main__ import main
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.engine.callbacks.callback import Evaluation
from pipeline.study.final_value.grid_pruner import open_grid_pruner
from pipeline.study.sweep.jobs import ESTIMATE_PRUNER, ESTIMATES, NO_PRUNER, read_least_chance
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
    # The same command does nothing. Another pruner would have ended other jobs.
    assert main(["-m", *grid, "hydra/sweeper/pruner=estimate"]) == 0
    capsys.readouterr()
    earlier = "the directory has hydra/sweeper/pruner=estimate (chance=0.05), the command"
    for words, current in (
        ((), "none"),
        (("hydra/sweeper/pruner=estimate", "hydra.sweeper.pruner.chance=0.2"), "estimate (chance="),
    ):
        assert main(["-m", *grid, *words]) == 1
        assert f"has another sweep: {earlier} {current}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["hydra/sweeper/pruner=median"], "must be estimate or none"),
        (
            ["hydra/sweeper/pruner=estimate", "hydra.sweeper.share=true"],
            "hydra.sweeper.share = true: must be false with hydra/sweeper/pruner=estimate",
        ),
        (
            ["hydra/sweeper/pruner=estimate", "hydra.sweeper.pruner._target_=pipeline.none.Pruner"],
            "hydra/sweeper/pruner = pipeline.none.Pruner: must be estimate or none; others compare",
        ),
    ],
)
def test_wrong_pruner_is_refused_before_the_first_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pipeline"])
    grid = ["+recipe=lenet5_digits", "seed=1,2", "eval.every_steps=5", "hydra.sweep.dir=mine"]
    assert main(["-m", *grid, *words]) == 2
    assert problem in capsys.readouterr().err
    assert not Path("mine").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sweeper", ["grid", "optuna"])
def test_pruner_that_is_not_installed_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sweeper: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pipeline"])
    monkeypatch.setitem(sys.modules, ESTIMATES, None)
    words = [f"hydra/sweeper={sweeper}", "hydra/sweeper/pruner=estimate", "hydra.sweep.dir=mine"]
    if sweeper == "optuna":
        words.append("hydra.sweeper.reports=evaluations")
    assert main(["-m", "+recipe=lenet5_digits", "seed=1,2", "eval.every_steps=5", *words]) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    rule = f"needs {ESTIMATES}, which this installation lacks"
    assert printed[-1].strip() == f"hydra/sweeper/pruner = estimate: {rule}"
    assert len(printed) <= 2
    assert not list(Path("mine").glob("*/summary.json"))
