"""Runs opened at steps: the bits that they had there, or one message and nothing written."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pipeline import run
from pipeline.checkpoint.checkpoint_folder import FOLDER, make_checkpoint_path
from pipeline.checkpoint.restore import read_checkpoint
from pipeline.cli.commands.root import ROOT as COMMANDS
from pipeline.core.errors import DataError, RunError
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.core.reporter import Reporter
from pipeline.inspect.replay import Replay, open_at, open_replay
from tests.command_line import compare, dump
from tests.conftest import MLP, ROOT, compose_tiny

LAYERS = (
    "model=layers",
    "model.layers=[flatten,{name: dense, features: '$classes'}]",
    "train.steps=8",
    "train.sink_size=4",
    "checkpoint.every_steps=1",
    "checkpoint.keep=20",
)
STEP_8 = "--step=8"
DOCUMENTED = re.findall(
    r"^    python -m pipeline ([^#\n]*)", (ROOT / "docs" / "replay.md").read_text(), re.MULTILINE
)


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(compose_tiny(cache, *LAYERS), folder).status == "done"
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The same run with the checkpoint of its last step alone."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    for step in range(8):
        shutil.rmtree(run_dir / FOLDER / str(step), ignore_errors=True)
    return run_dir


def edit_provenance(run_dir: Path, edit: Callable[[Any], None]) -> None:
    file = run_dir / "provenance.json"
    tree = json.loads(file.read_text())
    edit(tree["processes"][0])
    file.write_text(json.dumps(tree))


def edit_loss(run_dir: Path, step: int) -> None:
    log = run_dir / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    lines[step - 1] = re.sub('"loss": [^,]*', '"loss": 1.25', lines[step - 1])
    log.write_text("".join(lines))


def change_data(run_dir: Path) -> None:
    """Make the record say that the run was trained on other images."""

    def edit(process: Any) -> None:
        process["data"]["train"]["image"]["sha256"] = "0" * 64

    edit_provenance(run_dir, edit)


@pytest.mark.medium
def test_every_step_has_the_bits_of_the_run(
    trained: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forward, backward and without any checkpoint, and no file of the run changes."""
    shutil.rmtree(copied / FOLDER)
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with Reporter() as reporter, open_replay(copied, reporter) as replay:
        for step in (3, 5, 8, 1):
            state = flatten_by_path(replay.go_to(step))
            saved = read_checkpoint(make_checkpoint_path(trained / FOLDER, step)).arrays
            assert state.keys() == saved.keys()
            assert all(np.asarray(state[path]).tobytes() == saved[path].tobytes() for path in saved)
        assert replay.lost == []
    assert before == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    printed = capsys.readouterr().out
    assert printed.index("3 steps from the start, ") < printed.index("of step 0; 3 steps trained")
    assert "by the run's times" in printed
    assert "of step 3; 2 steps trained again, with the numbers of the run to the bit" in printed


@pytest.mark.medium
@pytest.mark.parametrize("parallel", ["data", "auto"])
def test_run_on_two_devices_has_its_bits(cache: Path, tmp_path: Path, parallel: str) -> None:
    """One of mode auto is placed by its plan: on one device, XLA would round otherwise."""
    run_dir = tmp_path / "run"
    devices = (
        f"parallel.mode={parallel}",
        "parallel.devices=2",
        "model.layers=[flatten,{name: "
        "dense, features: 64},relu,{name: dense, features: '$classes'}]",
    )
    run(compose_tiny(cache, *LAYERS, *devices), run_dir)
    saved = read_checkpoint(make_checkpoint_path(run_dir / FOLDER, 8)).arrays
    shutil.rmtree(run_dir / FOLDER)
    with Reporter() as reporter:
        state = flatten_by_path(open_at(run_dir, 8, reporter).state)
    assert all(np.asarray(state[path]).tobytes() == saved[path].tobytes() for path in saved)


@pytest.mark.medium
def test_changed_data_are_named_before_anything_is_written(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_data(copied)
    with pytest.raises(DataError, match=r"the data have changed .*: train image: was uint8 .*000"):
        dump([str(copied), STEP_8])
    with pytest.raises(DataError, match="train image: was"):
        compare([str(copied), "--against=train.precision=bf16"])
    assert not (copied / "dump").exists()
    capsys.readouterr()
    assert dump([str(copied), STEP_8, "--approximate", "--layers=dense_0", "--json"]) == 0
    out, printed = capsys.readouterr()
    (facts,) = json.loads(out)["dumps"]
    assert "the data have changed" in facts["approximate"][0]
    assert len(re.findall("^dump +approximate: step 8: ", printed, re.MULTILINE)) == 2
    folder = Path(facts["folder"])
    assert json.loads((folder / "dump.json").read_text())["approximate"] == facts["approximate"]
    entries = [json.loads(line) for line in (folder / "tensors.jsonl").read_text().splitlines()]
    assert entries
    assert all(entry["approximate"] is True for entry in entries)
    capsys.readouterr()
    compare([str(folder), str(folder)])
    assert "approximate: the data have changed" in " ".join(capsys.readouterr())
    rows = copied.parent / "rows.csv"
    changes = ["--against=train.precision=bf16", "--approximate", f"--out={rows}"]
    compare([str(copied), STEP_8, *changes])
    assert re.search("^loss +approximate: step 8: left ", capsys.readouterr().out, re.MULTILINE)
    assert [path.name for path in rows.parent.glob("rows*")] == ["rows.approximate.csv"]


@pytest.mark.medium
def test_changed_data_of_the_evaluation_alone_leave_the_bits(copied: Path) -> None:
    def edit(process: Any) -> None:
        process["data"]["eval"]["image"]["sha256"] = "0" * 64

    edit_provenance(copied, edit)
    with Reporter() as reporter:
        assert open_at(copied, 8, reporter).lost == ()


@pytest.mark.medium
@pytest.mark.parametrize("step", [0, 2])
def test_step_after_the_last_one_is_compared_too(copied: Path, step: int) -> None:
    """A callback that sets parameters changes nothing before: the start has no step to compare."""
    edit_loss(copied, step + 1)

    def edit(process: Any) -> None:
        process["versions"]["numpy"] = "1.0"
        process["machine"]["processor"] = "Abacus"

    edit_provenance(copied, edit)
    message = (
        rf"the state after step {step} can't be computed: .*step {step + 1}: loss 1.25 and .*"
        r"other software \(numpy 1\.0 -> .*another processor \(Abacus -> .*steps 8; --approximate"
    )
    with pytest.raises(RunError, match=message):
        dump([str(copied), f"--step={step}"])
    assert not (copied / "dump").exists()
    with Reporter() as reporter:
        opened = open_at(copied, step, reporter, approximate=True)
    assert len(opened.lost) == 1
    assert int(jax.device_get(opened.state.step)) == step


@pytest.mark.medium
def test_run_without_checkpoints_is_compared_at_its_last_step(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copied / FOLDER)
    assert compare([str(copied), "--against=seed=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 8


@pytest.mark.medium
def test_steps_that_the_run_has_not_done_are_refused_at_once(copied: Path) -> None:
    with pytest.raises(DataError, match=r"step 9: must be from 0 to 8, the last step that the ru"):
        dump([str(copied), "--step=3|9"])
    assert not (copied / "dump").exists()
    # A run that ended early, such as by a non-finite step, has no later states.
    log = copied / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:5]))
    shutil.rmtree(copied / FOLDER)
    with pytest.raises(DataError, match="step 6: must be from 0 to 5"):
        dump([str(copied), "--step=6"])
    with Reporter() as reporter, pytest.raises(DataError, match="step -1: must be from 0 to 5"):
        open_at(copied, -1, reporter)


def test_document_has_commands() -> None:
    assert len(DOCUMENTED) == 10


@pytest.mark.medium
def test_documented_commands_run(
    copied: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied.parent / "outputs"
    folder.mkdir()
    copied.rename(folder / "again")
    run(compose_tiny(cache, *LAYERS, "train.optimizer.lr=1e-9"), folder / "surprise")
    monkeypatch.chdir(folder.parent)
    statuses = [COMMANDS(shlex.split(command)) for command in DOCUMENTED]
    # compare: 1 if it names a layer.
    assert [status for number, status in enumerate(statuses) if number != 2] == [0] * 9
    assert statuses[2] in (0, 1)


@pytest.mark.medium
def test_non_finite_step_has_a_record_and_no_state_after_it(cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(RunError, match="Invalid loss"):
        run(compose_tiny(cache, *MLP, "train.optimizer.lr=1e20", "train.steps=8"), run_dir)
    end = len((run_dir / "metrics.jsonl").read_text().splitlines())
    with Reporter() as reporter, open_replay(run_dir, reporter) as replay:
        assert int(replay.go_to(end - 1).step) == end - 1
        assert not np.isfinite(replay.compute_step(end).loss[0])
        rule = rf"step {end}: must be from 0 to {end - 1}; step {end} isn't finite"
        with pytest.raises(DataError, match=rule):
            replay.go_to(end)


@pytest.mark.medium
def test_record_of_a_step_is_compared_with_the_log(copied: Path) -> None:
    with Reporter() as reporter, open_replay(copied, reporter) as replay:
        logged = json.loads((copied / "metrics.jsonl").read_text().splitlines()[4])
        assert replay.compute_step(5).columns["loss"][0] == np.float32(logged["loss"])
        edit_loss(copied, 5)
        with pytest.raises(RunError, match=r"step 5: loss 1\.25 and "):
            replay.compute_step(5)


def test_steps_are_counted_from_1(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    opened: Any = None
    with Reporter() as reporter:
        replay = Replay(opened, tmp_path, reporter)
        with pytest.raises(DataError, match="step 0: must be from 1 to 3, the last step"):
            replay.compute_step(0)
