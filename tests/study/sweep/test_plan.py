"""Jobs of a grid are those that composing each would give, with few compositions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import train
from pipeline.stages.record.recorded_recipe import write_recipe
from pipeline.study.sweep import grid, plan, table
from pipeline.study.sweep.plan import PlannedJob, plan_job

GRIDS = [
    (["train.optimizer.lr=0.01,0.05", "train.sink_size=10,100", "seed=1,2"], 1),
    (["model=lenet5,mlp", "train.optimizer.lr=0.01,0.05"], 2),
    (["train.optimizer={lr: 0.5},{lr: 0.25}", "seed=1,2"], 2),
    (["train.steps=30", "train.optimizer.lr=0.1,0.2", "++eval.samples=7,all"], 2),
    (["name=a,'b,c'", "hydra.sweep.subdir=${name}_${train.batch_size}", "train.batch_size=4,8"], 1),
    (["hydra.sweep.subdir=${hydra.job.override_dirname}", "seed=3,4", "autotune=off,bank"], 1),
]


def planned(
    overrides: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[PlannedJob], list[PlannedJob], int]:
    """The jobs of a grid, those that are composed one by one, and the number of compositions."""
    found: list[list[PlannedJob]] = []
    counts: list[int] = []

    def plan_both(
        sweeper: Any, arguments: Sequence[str], *, with_recipes: bool
    ) -> list[PlannedJob]:
        before, calls = plan.compose_job, []

        def counted(*given: Any) -> Any:
            calls.append(given)
            return before(*given)

        with monkeypatch.context() as patched:
            patched.setattr(plan, "compose_job", counted)
            jobs = grid_plan(sweeper, arguments, with_recipes=with_recipes)
        counts.append(len(calls))
        swept = list(jobs[0].changed)
        each = [plan_job(sweeper, job.number, job.overrides, swept) for job in jobs]
        found.extend([jobs, each])
        return jobs

    grid_plan = grid.plan_grid
    monkeypatch.setattr(grid, "plan_grid", plan_both)
    monkeypatch.setattr(grid, "run_all", lambda *_: None)
    monkeypatch.setattr(table, "conclude_sweep", lambda *_, **__: 0)
    assert train.main(["-m", "+recipe=lenet5_digits", *overrides, "hydra.sweep.dir=mine"]) == 0
    return found[0], found[1], counts[0]


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "compositions"), GRIDS)
def test_planned_grid_equals_separately_planned_jobs(
    overrides: list[str], compositions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs, each, composed = planned(overrides, monkeypatch)
    assert composed == compositions
    assert len(jobs) >= 4
    for one, other in zip(jobs, each, strict=True):
        assert (one.number, one.folder, one.overrides) == (
            other.number,
            other.folder,
            other.overrides,
        )
        assert one.changed == other.changed
        assert one.recipe is None


@pytest.mark.slow
def test_recipes_of_earlier_jobs_equal_composed_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["train.optimizer.lr=0.01,0.05", "seed=1,2"]
    jobs, each, _ = planned(overrides, monkeypatch)
    for job, own in zip(jobs, each, strict=True):
        assert own.recipe is not None
        write_recipe(job.folder, own.recipe)
    with monkeypatch.context() as patched:
        again, _, _ = planned(overrides, patched)
    assert [job.recipe for job in again] == [job.recipe for job in each]
    assert len({job.recipe.seed for job in again if job.recipe}) == 2
