"""Plans of `parallel.mode=auto`: searched once, kept with the run, and taken from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from pipeline.checkpoint.restore import read_saved
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]
AUTO = (
    "model=mlp",
    "model.hidden=[16]",
    "train.steps=20",
    "train.optimizer.lr=0.05",
    "checkpoint.every_steps=10",
    "parallel.mode=auto",
    "parallel.reproducible=layout",
    "parallel.devices=4",
)
ALONE = AUTO[:-3]

pytestmark = pytest.mark.slow


def test_planned_run_matches_one_device(
    tiny: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """X-05: also without sinks, where every step has its line."""
    run(tiny(*ALONE, "monitor.lines=callbacks"), tmp_path / "alone")
    assert capsys.readouterr().out.count(", loss is ") == 1
    run(tiny(*AUTO, "train.sink=false", "monitor.lines=callbacks"), tmp_path / "auto")
    said = capsys.readouterr().out
    assert said.count(", loss is ") == 20
    assert "MODELLED, not measured: lenet5_digits on 4 devices" in said
    assert "<- chosen" in said
    assert "compile    collectives: " in said
    plan = yaml.safe_load((tmp_path / "auto/plan.yaml").read_text())
    assert plan["mesh"]["data"] * plan["mesh"]["model"] == 4
    for path, array in read_saved(tmp_path / "alone").arrays.items():
        other = read_saved(tmp_path / "auto").arrays[path]
        np.testing.assert_allclose(other, array, rtol=1e-3, atol=1e-6, err_msg=path)


def test_resumed_run_keeps_its_plan(tiny: Compose, tmp_path: Path) -> None:
    run(tiny(*AUTO, "train.end_step=10"), tmp_path)
    before = (tmp_path / "plan.yaml").read_text()
    run(tiny(*AUTO, f"train.resume={tmp_path}"))
    assert outcome.read_summary(tmp_path)["steps"] == 20
    assert (tmp_path / "plan.yaml").read_text() == before


def test_edited_plan_is_used(
    tiny: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {
        "mesh": {"data": 2, "model": 2},
        "batch": ["data"],
        "specs": [{"pattern": "dense_0/kernel", "axes": [None, "model"]}],
        "constraints": [],
    }
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(plan))
    run(tiny(*AUTO, f"parallel.plan={file}"), tmp_path / "run")
    assert "plan       2 x 2 devices, batch by data, dense_0/kernel [null, model]" in (
        capsys.readouterr().out
    )


def test_unsuitable_plan_is_refused(tiny: Compose, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mesh: {data: 3, model: 1}\nbatch: [data]\nspecs: []\nconstraints: []\n")
    with pytest.raises(RecipeError, match="mesh"):
        run(tiny(*AUTO, f"parallel.plan={file}"), tmp_path / "run")


def test_batch_is_sharded_as_the_plan_says(tiny: Compose, tmp_path: Path) -> None:
    """A batch of 33 on 2 x 2 devices: copied to all, or refused."""
    file = tmp_path / "mine.yaml"
    file.write_text("mesh: {data: 2, model: 2}\nbatch: []\n")
    recipe = tiny(*AUTO, f"parallel.plan={file}", "train.batch_size=33", "train.steps=2")
    run(recipe, tmp_path / "copied")
    file.write_text("mesh: {data: 2, model: 2}\nbatch: data\n")
    problem = r"mine.yaml: batch = \[data\]: 2 devices don't divide train.batch_size = 33"
    with pytest.raises(RecipeError, match=problem):
        run(recipe, tmp_path / "refused")
    sizes = ("train.batch_size=32", "dataset.eval.batch_size=33", "train.steps=2")
    recipe = tiny(*AUTO, f"parallel.plan={file}", *sizes)
    with pytest.raises(RecipeError, match=r"2 devices don't divide dataset.eval.batch_size = 33"):
        run(recipe, tmp_path / "refused_too")


def test_damaged_plan_of_a_run_gives_way_to_the_plan_file(
    tiny: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mesh: {data: 4, model: 1}\nbatch: data\n")
    recipe = tiny(*AUTO, f"parallel.plan={file}", "train.end_step=10")
    run(recipe, tmp_path / "run")
    (tmp_path / "run/plan.yaml").write_text("mesh: {data: .inf, model: 4}\n")
    capsys.readouterr()
    run(tiny(*AUTO, f"parallel.plan={file}", f"train.resume={tmp_path / 'run'}"))
    said = capsys.readouterr().out
    assert "plan.yaml is for other devices, or can't be read; planned again" in said
    assert f"plan       4 x 1 devices, data parallel; from {file}" in said


def test_too_little_memory_for_any_plan_is_refused(tiny: Compose, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no plan fits in 0\.00 GiB a device"):
        run(tiny(*AUTO, "parallel.memory_gib=0.00001"), tmp_path / "run")
