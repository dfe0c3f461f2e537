"""Runs of an arena as files: their evaluations, what counts as diverged, and the choice of one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core.errors import DataError, RunError
from pipeline.study.arena.contest import SHIPPED, Contest, ContestBudget
from pipeline.study.arena.contest_runs import PLAN, choose_trial, hold_arena, read_run
from tests.study.arena.runs import make_run

CONTEST = Contest("optimizer", ("adamw", "sgd"), "adamw", (SHIPPED[0],), 4, 6, 0)
BUDGETS = ((4, 6), (4, 6), (4, 8), (9, 8))
"""Trials and seeds of four commands."""


def write_run(
    folder: Path,
    losses: list[float | None],
    accuracies: list[float | None],
    status: str = "done",
) -> Path:
    summary = {"status": status, "time": {"step_ms": 3.0}, "metrics": {}}
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    lines = [
        json.dumps({"step": 2 * step, "accuracy": accuracy})
        for step, accuracy in enumerate(accuracies, start=1)
    ]
    (folder / "evals.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_evaluations_of_a_run_are_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [2.0, 1.0], [0.5, 0.75]), "accuracy")
    assert (run.steps, run.values, run.step_ms, run.value) == ((2, 4), (0.5, 0.75), 3.0, 0.75)
    assert run.find_step(0.5, is_larger=True) == 2
    assert run.find_step(0.6, is_larger=True) == 4
    assert run.find_step(0.6, is_larger=False) == 2
    assert run.find_step(0.9, is_larger=True) is None


@pytest.mark.parametrize(
    ("losses", "accuracies", "status"),
    [
        ([2.0, None], [0.5], "failed"),
        ([2.0, 1.0], [0.5, None], "done"),
        ([2.0, 1.0], [], "done"),
        ([2.0, *[1.0] * 8, 3.1], [0.5], "done"),
        ([2.0, 1.0], [0.5], "stopped"),
    ],
    ids=["loss", "metric", "no evaluation", "risen", "not done"],
)
def test_diverged_run_has_no_value(
    tmp_path: Path, losses: list[float | None], accuracies: list[float | None], status: str
) -> None:
    run = read_run(write_run(tmp_path, losses, accuracies, status), "accuracy")
    assert run.has_diverged
    assert run.value is None


def test_loss_that_rises_a_little_has_not_diverged(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [2.0, *[1.0] * 8, 2.9], [0.5]), "accuracy")
    assert run.value == 0.5


def test_missing_metric_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, [2.0], [0.5])
    with pytest.raises(RunError, match="evaluations have no rmse; they have accuracy"):
        read_run(tmp_path, "rmse")


def test_best_trial_is_the_first_of_equal_ones() -> None:
    runs = [make_run([0.9, 0.5]), make_run([0.7]), make_run([0.7]), make_run([0.1, None])]
    assert choose_trial(runs, "accuracy") == 1
    assert choose_trial(runs, "loss") == 0
    assert choose_trial(runs[3:], "accuracy") is None


def test_folder_remembers_what_was_declared(tmp_path: Path) -> None:
    with hold_arena(tmp_path / "mine", CONTEST):
        pass
    declared = json.loads((tmp_path / "mine" / PLAN).read_text())
    assert declared["spaces"]["digits"]["sgd"] == {"train.optimizer.lr": [0.00316, 3.16]}
    more = Contest("optimizer", ("adamw", "sgd"), "adamw", (SHIPPED[0],), 9, 8, 0)
    with hold_arena(tmp_path / "mine", more):
        assert json.loads((tmp_path / "mine" / PLAN).read_text())["trials"] == 9
    other = Contest("optimizer", ("adamw", "sgd"), "adamw", (SHIPPED[0],), 9, 8, 5)
    with (
        pytest.raises(RunError, match="has another arena: its tuning_seed is 0, this one's 5"),
        hold_arena(tmp_path / "mine", other),
    ):
        pass


def test_budget_grows_and_its_past_is_kept(tmp_path: Path) -> None:
    contests = [replace(CONTEST, trials=trials, num_seeds=seeds) for trials, seeds in BUDGETS]
    for contest in contests:
        with hold_arena(tmp_path / "mine", contest) as held:
            pass
    assert held.earlier_budgets == (ContestBudget(4, 6), ContestBudget(4, 8))
    declared = json.loads((tmp_path / "mine" / PLAN).read_text())
    assert declared["earlier_budgets"] == [
        {"trials": 4, "seeds": 6},
        {"trials": 4, "seeds": 8},
    ]
    # Without the key, as a folder of the first version.
    del declared["earlier_budgets"]
    (tmp_path / "mine" / PLAN).write_text(json.dumps(declared))
    with hold_arena(tmp_path / "mine", contests[-1]) as held:
        assert held.earlier_budgets == ()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"trials": 3}, "has 4 trials, this command 3: runs whose results may be known can't"),
        ({"num_seeds": 5, "trials": 9}, "has 6 seeds, this command 5"),
    ],
)
def test_budget_does_not_shrink(tmp_path: Path, changes: dict[str, int], problem: str) -> None:
    with hold_arena(tmp_path / "mine", CONTEST):
        pass
    declared = (tmp_path / "mine" / PLAN).read_bytes()
    smaller = replace(CONTEST, **changes)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=problem), hold_arena(tmp_path / "mine", smaller):
        pass
    assert (tmp_path / "mine" / PLAN).read_bytes() == declared


@pytest.mark.parametrize("changes", [{"trials": "x"}, {"seeds": 3}, {"earlier_budgets": [[1, 2]]}])
def test_damaged_budget_is_named(tmp_path: Path, changes: dict[str, object]) -> None:
    declared = json.loads(json.dumps(CONTEST.to_dict())) | changes
    (tmp_path / PLAN).write_text(json.dumps(declared))
    with pytest.raises(DataError, match="must hold trials"), hold_arena(tmp_path, CONTEST):
        pass


@pytest.mark.parametrize("text", ["{", "[1]", "{}"])
def test_damaged_declaration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / PLAN).write_text(text)
    with pytest.raises(DataError, match=PLAN), hold_arena(tmp_path, CONTEST):
        pass


def test_folder_is_held_by_one_process(tmp_path: Path) -> None:
    with (
        hold_arena(tmp_path / "mine", CONTEST),
        pytest.raises(RunError, match="another arena runs in it"),
        hold_arena(tmp_path / "mine", CONTEST),
    ):
        pass
