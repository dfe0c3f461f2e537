"""Run directories that were changed by others, or are theirs, when a run goes on in them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import load_recipe
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path, make_draft_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RunError
from pipeline.engine.monitors import verified_log
from pipeline.stages.record import trained_run
from tests import outcome
from tests.conftest import MLP, TINY
from tests.test_shared_machines import At, log_of
from tests.whole_run import run

Compose = Callable[..., Recipe]
pytestmark = pytest.mark.mlp

EVENTS = ["train.sink_size=4", "checkpoint.every_steps=8", "eval.every_steps=12"]
LENGTH = ["train.steps=45", *EVENTS]


@pytest.fixture(scope="module")
def unbroken(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run(load_recipe("lenet5_digits", [*TINY, *MLP, *LENGTH, f"cache.root={cache}"]), folder)
    return folder


@pytest.fixture
def half(unbroken: Path, tmp_path: Path) -> Path:
    """The run as if it had been killed when the checkpoint of step 32 was there."""
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    for step in outcome.checkpoints(run_dir):
        if step > 32:
            shutil.rmtree(make_checkpoint_path(run_dir / "checkpoints", step))
    (run_dir / "summary.json").unlink()
    return run_dir


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# What the logs lack.


def lose_the_end(file: Path) -> None:
    text = file.read_bytes()
    file.write_bytes(text[: len(text) // 4] + bytes(100))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda file: None,
    "the end": lose_the_end,
    "all": Path.unlink,
    "CR LF": lambda file: file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n")),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_lost_log_lines_are_restored_from_the_checkpoint(
    damage: str, half: Path, unbroken: Path, tiny: Compose
) -> None:
    for name in ("metrics.jsonl", "evals.jsonl"):
        DAMAGES[damage](half / name)
    summary = run(tiny(*LENGTH, f"train.resume={half}"))
    assert summary.resumed_from == {"run": str(half), "step": 32}
    for name in ("metrics.jsonl", "evals.jsonl"):
        assert (half / name).read_bytes() == (unbroken / name).read_bytes()
    damaged = [] if damage == "nothing" else ["metrics.jsonl", "evals.jsonl"]
    assert list(outcome.read_summary(half)["logs"]) == damaged
    assert log_of(half).count("it is complete again") == len(damaged)
    assert not list(half.glob("damaged-*"))


@pytest.mark.slow
def test_unrecoverable_lines_are_reported_until_the_end(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends done, or is done again, says what its logs lack."""
    monkeypatch.setattr(verified_log, "TAIL_BYTES", 1000)
    run_dir = tmp_path / "run"
    run(tiny("train.steps=24", *EVENTS), run_dir)
    file = run_dir / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:4], *lines[9:]]))
    for steps in (32, 45):
        assert run(tiny(f"train.steps={steps}", *EVENTS, f"train.resume={run_dir}")).steps == steps
        summary = outcome.read_summary(run_dir)
        assert summary["status"] == "done"
        aside = {"set_aside": "damaged-metrics.jsonl-1"} if steps == 32 else {}
        assert summary["logs"]["metrics.jsonl"] == {
            "missing": [[5, 9]],
            "missing_lines": 5,
            "verified": False,
            "restored": [],
            **aside,
        }
    warned = [line for line in log_of(run_dir).splitlines() if " warning " in line]
    warned = [line for line in warned if "never predicted" not in line]
    assert ["5 lines are missing: steps 5 to 9" in line for line in warned] == [True, True]
    steps_left = [line["step"] for line in outcome.read_lines(file)]
    assert steps_left == [*range(1, 5), *range(10, 46)]


@pytest.mark.slow
@pytest.mark.parametrize("marks", [None, {"metrics.jsonl": {"size_bytes": "x"}, "evals.jsonl": 3}])
def test_checkpoint_without_marks_can_be_resumed(
    marks: object, half: Path, unbroken: Path, tiny: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of somebody else's, whose marks are none."""
    restore = trained_run.restore_state

    def without_marks(*args: Any) -> Any:
        state, host = restore(*args)
        assert set(host.logs) == {"metrics.jsonl", "evals.jsonl"}
        return state, replace(host, logs=marks or {})

    monkeypatch.setattr(trained_run, "restore_state", without_marks)
    run(tiny(*LENGTH, f"train.resume={half}"))
    for name in ("metrics.jsonl", "evals.jsonl"):
        assert (half / name).read_bytes() == (unbroken / name).read_bytes()
    assert outcome.read_summary(half)["logs"] == {}


# Other processes.


@pytest.mark.slow
@pytest.mark.parametrize("removed", [["run.log"], [".lock"], ["run.log", ".lock"]])
def test_running_run_remains_locked_if_its_files_are_removed(
    removed: list[str], unbroken: Path, tiny: Compose, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    refused: list[str] = []

    def join() -> None:
        for name in removed:
            (run_dir / name).unlink()
        with pytest.raises(RunError) as caught:
            run(tiny(*LENGTH, f"train.resume={run_dir}"))
        refused.append(str(caught.value))

    assert run(tiny(*LENGTH), run_dir, pruner=At(8, join)).status == "done"
    assert refused == [f"{run_dir}: another process is writing this run"]
    assert (run_dir / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()


# Directories of somebody else's.


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "run.log",
        "metrics.jsonl",
        "evals.jsonl",
        "embeddings",
        "checkpoints",
        str(make_checkpoint_path(Path("checkpoints"), 32)),
    ],
)
def test_resumed_run_with_links_is_refused(name: str, half: Path, tiny: Compose) -> None:
    """Whoever made the directory would have files of this user written, truncated and deleted."""
    outside = half.parent / "outside"
    outside.mkdir()
    (outside / "9.orbax-checkpoint-tmp").mkdir()
    (outside / "mine").write_text("mine")
    shutil.rmtree(half / name) if (half / name).is_dir() else (half / name).unlink(missing_ok=True)
    target = outside / "mine" if "." in name else outside
    (half / name).symlink_to(target)
    before = files_of(half), files_of(outside)
    with pytest.raises(DataError) as caught:
        run(tiny(*LENGTH, "monitor.tensorboard=true", f"train.resume={half}"))
    assert str(caught.value).startswith(f"{half / name}: is a link to {target}; ")
    assert caught.value.exit_status == 2
    assert (files_of(half), files_of(outside)) == before
    assert (outside / "9.orbax-checkpoint-tmp").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl", "run.log", "summary.json"])
def test_pipe_or_directory_in_place_of_a_file_is_refused(
    name: str, half: Path, tiny: Compose
) -> None:
    (half / name).unlink(missing_ok=True)
    os.mkfifo(half / name)
    with pytest.raises(DataError, match=f"{name}: isn't a regular file; remove it"):
        run(tiny(*LENGTH, f"train.resume={half}"))
    (half / name).unlink()
    (half / name).mkdir()
    with pytest.raises(DataError, match=f"{name}: is a directory, and must be a file"):
        run(tiny(*LENGTH, f"train.resume={half}"))


@pytest.mark.medium
def test_named_directory_without_a_recipe_is_not_cleaned(tiny: Compose, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    make_draft_path(make_checkpoint_path(tmp_path / "checkpoints", 8)).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=r"holds a run without its recipe\.yaml: checkpoints, met"):
        run(tiny(*LENGTH), tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
