"""Runs that are run again and compared, old ones too."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline.cli.runs.reproduce import compare_and_report
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, UsageError
from pipeline.stages.record.run_record import read_record
from pipeline.stages.runner.resumed_run import find_run_to_resume
from tests import outcome
from tests.command_line import export, infer, reproduce
from tests.conftest import compose_tiny
from tests.test_shared_machines import At
from tests.whole_run import run

pytestmark = pytest.mark.slow

Compose = Callable[..., Recipe]

NEWER = [
    "seed",
    "autotune",
    "checkpoint.rules",
    "train.ema",
    "dataset.buckets",
    "train.loss.smoothing",
]
"""Keys that an old run may not have known; with their defaults the tiny recipe is the same."""


@pytest.fixture(scope="module")
def kept(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    run(compose_tiny(cache), run_dir)
    return run_dir


@pytest.fixture
def copy(kept: Path, tmp_path: Path) -> Path:
    return shutil.copytree(kept, tmp_path / "copy")


@pytest.fixture
def old(copy: Path) -> Path:
    """A run from before there were some keys, before data, code and machine were kept."""
    tree = yaml.safe_load((copy / "recipe.yaml").read_text())
    for key in NEWER:
        *path, last = key.split(".")
        section = tree
        for name in path:
            section = section[name]
        del section[last]
    (copy / "recipe.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    (copy / "provenance.json").unlink()
    return copy


@pytest.fixture(autouse=True)
def _works_in_a_folder_of_its_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))


def change(file: Path, edit: Callable[[Any], Any]) -> None:
    """Edit a file of JSON."""
    tree = json.loads(file.read_text())
    edit(tree)
    file.write_text(json.dumps(tree))


def with_loss(run_dir: Path, step: int, loss: float) -> None:
    """The log with another loss at a step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines[step - 1]["loss"] = loss
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text)


def lay_trap(run_dir: Path, folder: Path) -> None:
    """Make a run say that it was started in a folder with code, as a stranger's run may."""
    folder.mkdir()
    for module in ("pipeline", "jax", "json"):
        (folder / f"{module}.py").write_text("raise SystemExit(3)")
    change(
        run_dir / "provenance.json", lambda tree: tree["processes"][0].update(folder=str(folder))
    )


def test_old_run_is_reproduced_bit_for_bit(
    old: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert reproduce([str(old), "--out=again"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[-1] == "verdict      reproduced: 45 steps are the same, bit for bit"
    assert "metrics      the same" in said
    assert "lower      as before: " in (tmp_path / "again" / "run.log").read_text()
    outcome.assert_same_run(old, tmp_path / "again")


@pytest.mark.mlp
def test_stopped_run_is_reproduced_up_to_its_last_step(
    tiny: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = At(20, lambda: os.kill(os.getpid(), signal.SIGTERM))
    recipe = tiny("train.steps=16000", "train.sink_size=10", "train.dispatch_seconds=0.01")
    assert run(recipe, tmp_path / "kept", pruner=stop).status == "stopped"
    lay_trap(tmp_path / "kept", tmp_path / "trap")
    capfd.readouterr()
    assert reproduce([str(tmp_path / "kept"), "monitor.loss_every=0"]) == 0
    (again,) = tmp_path.glob("outputs/*/*_lenet5_digits_reproduced")
    summary = outcome.read_summary(again)
    assert summary["status"] == "stopped"
    assert outcome.read_summary(tmp_path / "kept")["steps"] <= summary["steps"] < 16_000
    said = capfd.readouterr().out
    assert "verdict      reproduced: " in said
    assert "metrics      not kept by both runs" in said


def test_first_differing_loss_is_named_with_other_differences(
    kept: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = outcome.metrics(kept)[16]["loss"]
    next_loss = float(str(np.nextafter(np.float32(loss), np.float32(9))))
    with_loss(copy, 17, next_loss)

    def as_elsewhere(tree: Any) -> None:
        (process,) = tree["processes"]
        process["versions"]["jax"] = "0.9.0"
        process["data"]["train"]["image"]["sha256"] = 64 * "0"

    change(copy / "provenance.json", as_elsewhere)
    assert compare_and_report(read_record(copy), read_record(kept)).exit_status == 1
    said = capsys.readouterr().out
    assert f"1 of 45 differ, from step 17: loss {next_loss} and {loss}, " in said
    assert "(1 in the last place of float32)" in said
    assert "versions.jax" in said
    assert "0.9.0" in said
    assert "train.image.sha256" in said
    assert said.splitlines()[-1] == "verdict      not reproduced"


def test_differing_metric_fails_reproduction(
    kept: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(copy / "summary.json", lambda tree: tree["metrics"].update(accuracy=0.125))
    assert compare_and_report(read_record(kept), read_record(copy)).exit_status == 1
    assert "metrics.accuracy" in capsys.readouterr().out


def test_missing_steps_fail_reproduction(
    kept: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:40]))
    assert compare_and_report(read_record(kept), read_record(copy)).exit_status == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "verdict      not reproduced: the new run lacks the last 5 steps"


def test_wrong_recipe_is_reported_and_leaves_no_run(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And nothing is left of a run that never began."""
    assert reproduce([str(kept), "train.batch_size=0"]) == 2
    assert "train.batch_size = 0: must be greater than 0" in capfd.readouterr().err
    assert not list(Path().glob("outputs/*/*"))


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ([], UsageError, "reproduce: RUN_DIR is missing; reproduce takes RUN_DIR"),
        (["one", "hydra.run.dir=x"], UsageError, "hydra.run.dir=x: is an option: --out x"),
        (["one", "two"], UsageError, "two: must be KEY=VALUE"),
        (["--fast"], UsageError, "--fast: there is no such option"),
        (["nowhere"], DataError, "nowhere: there is no such run"),
        (["nowhere", "train.resume=auto"], UsageError, "train.resume=auto: goes on with a run"),
    ],
)
def test_wrong_arguments_are_reported(
    args: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        reproduce(args)


def test_run_without_steps_is_reported(tiny: Compose, tmp_path: Path) -> None:
    run(tiny("stages=[data]"), tmp_path / "run")
    with pytest.raises(DataError, match=r"metrics\.jsonl: has no step to compare with"):
        reproduce([str(tmp_path / "run")])


# What else an old run must go on being good for.


def test_old_run_is_resumed(old: Path, tiny: Compose) -> None:
    longer = tiny("train.steps=50", f"train.resume={old}")
    assert find_run_to_resume(longer) == old
    assert run(longer).steps == 50
    assert yaml.safe_load((old / "recipe.yaml").read_text()) == longer.model_dump(mode="json")


def test_old_run_can_be_exported_and_infers(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(old), str(tmp_path / "exported")]) == 0
    np.save(tmp_path / "image.npy", np.zeros((8, 8, 1), np.uint8))
    answers = []
    for source in (old, tmp_path / "exported"):
        capsys.readouterr()
        assert infer([str(source), str(tmp_path / "image.npy")]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
