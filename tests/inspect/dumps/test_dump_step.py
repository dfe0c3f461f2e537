"""Dumps during a run and of its checkpoints: the run stays what it is."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline import run
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.checkpoint.restore import list_saved_steps, read_checkpoint
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, RunError, UsageError
from pipeline.inspect.dumps import dump_files
from pipeline.inspect.dumps.dump_files import TensorName, find_dump, read_dump
from pipeline.inspect.dumps.opened_recipe import open_recipe
from tests.command_line import dump as main
from tests.compiling import optimized

MLP = (
    "model=layers",
    "model.layers=[{name: conv, features: 2, kernel: 3, stride: 4},relu,flatten,"
    "{name: dense, features: '$classes'}]",
    "train.steps=12",
    "checkpoint.every_steps=4",
    "train.sink_size=6",
)


@pytest.fixture(scope="module")
def plain(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.conftest import compose_tiny

    folder = tmp_path_factory.mktemp("plain") / "run"
    assert run(compose_tiny(cache, *MLP), folder).status == "done"
    return folder


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    return dict(read_checkpoint(make_checkpoint_path(run_dir / "checkpoints", 12)).arrays)


@pytest.mark.slow
def test_dumps_do_not_change_training(
    plain: Path, tmp_path: Path, tiny: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny(*MLP, "dump.steps='0|5|7-8'", "dump.layers=[conv_*]")
    assert run(recipe, tmp_path / "run").status == "done"
    for log in ("metrics.jsonl", "evals.jsonl"):
        assert (tmp_path / "run" / log).read_bytes() == (plain / log).read_bytes()
    before, after = weights(plain), weights(tmp_path / "run")
    assert before.keys() == after.keys()
    assert all(before[path].tobytes() == after[path].tobytes() for path in before)
    told = capsys.readouterr().out
    for step in (0, 5, 7, 8):
        assert re.search(
            rf"^dump +step {step}: loss .*(the run's own|units? in the last)", told, re.MULTILINE
        )
    (folder,) = (tmp_path / "run" / "dump").glob("*/0/layers/1")
    assert sorted(int(path.name) for path in folder.iterdir()) == [0, 5, 7, 8]
    found = read_dump(folder / "5")
    assert {name.layer for name in found.entries} == {"conv_0"}
    assert found.about["run_loss"] == pytest.approx(found.about["loss"], rel=1e-6)
    images = found.read(TensorName("conv_0", "input"))
    assert images is not None
    assert images.shape == (16, 32, 32, 1)


@pytest.mark.slow
def test_full_disk_does_not_end_the_run(
    plain: Path,
    tmp_path: Path,
    tiny: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_whole = dump_files.write_whole

    def full(path: Path, content: str | bytes) -> None:
        if path.name.startswith("relu_0.output."):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_whole(path, content)

    monkeypatch.setattr(dump_files, "write_whole", full)
    assert run(tiny(*MLP, "dump.steps='5|8'"), tmp_path / "run").status == "done"
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert metrics == (plain / "metrics.jsonl").read_bytes()
    told = capsys.readouterr().out
    assert "dump of step 5 stops at relu_0:output:0: No space left on device; the run" in told
    (folder,) = (tmp_path / "run" / "dump").glob("*/0/layers/1/*")
    assert json.loads((folder / "dump.json").read_text())["stopped"].startswith("stops at relu_0")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("dump.layers=[convv_0]", "did you mean conv_0"),
        ("dump.steps=12", "training has 12 steps"),
    ],
)
def test_impossible_dump_is_refused_before_training(
    override: str, problem: str, tmp_path: Path, tiny: Callable[..., Recipe]
) -> None:
    with pytest.raises(RecipeError, match=problem):
        run(tiny(*MLP, "dump.steps=5", override), tmp_path / "run")
    assert list_saved_steps(tmp_path / "run" / "checkpoints") == []


@pytest.mark.slow
def test_dump_command_equals_the_dump_of_the_run(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = (plain / "metrics.jsonl").read_bytes()
    args = [
        str(plain),
        "--step=8|9",
        "--layers=dense_0,train.loss",
        f"--out={tmp_path / 'new'}",
        "--json",
    ]
    assert main(args) == 0
    out, told = capsys.readouterr()
    assert [entry["step"] for entry in json.loads(out)["dumps"]] == [8, 9]
    assert "of step 8; 1 step trained again" in told
    assert len(re.findall("the run's own, to the bit|in the last place", told)) == 2
    (folder,) = tmp_path.glob("new/*/0/layers/1/9")
    found = read_dump(folder)
    assert {name.layer for name in found.entries} == {"dense_0", "train.loss"}
    assert (plain / "metrics.jsonl").read_bytes() == logged
    with pytest.raises(DataError, match="has 2 dumps"):
        find_dump(tmp_path / "new")


@pytest.mark.slow
def test_steps_from_the_start_have_the_bits_of_the_run(
    tmp_path: Path, tiny: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of step 0 are made again: a program that fuses their formula has other bits."""
    run_dir = tmp_path / "run"
    with optimized():
        run(tiny("train.steps=40"), run_dir)
        main([str(run_dir), "--step=30", "--layers=dense_0"])
        printed = capsys.readouterr().out
        assert "of step 0; 30 steps trained again" in printed
        log = run_dir / "metrics.jsonl"
        lines = log.read_text().splitlines(keepends=True)
        lines[20] = re.sub('"loss": [^,]*', '"loss": 1.25', lines[20])
        log.write_text("".join(lines))
        main([str(run_dir), "--step=19", "--layers=dense_0"])
        with pytest.raises(RunError, match=r"step 21: loss 1.25 and .* checkpoints are of the ste"):
            main([str(run_dir), "--step=30"])
        log.unlink()
        with pytest.raises(RunError, match=r"metrics.jsonl is missing, so nothing shows"):
            main([str(run_dir), "--step=30"])


@pytest.mark.parametrize(
    ("args", "error", "problem"),
    [
        ([], UsageError, "dump takes RUN_DIR"),
        (["--step=3"], UsageError, "RUN_DIR is missing; dump takes RUN_DIR"),
        (["RUN", "step=3"], UsageError, "step=3: is an option: --step 3"),
        (["RUN"], UsageError, "step is missing"),
        (["RUN", "--step=x"], UsageError, "must be steps such as"),
        (["RUN", "--step=3", "wat=all"], UsageError, "did you mean --what"),
        (["RUN", "--step=3", "--what=every"], UsageError, "must be one of input, output, all"),
        (["RUN", "--step=3", "--as=json"], UsageError, "must be one of tensors, statistics"),
        (["RUN", "--step=99"], DataError, "must be from 0 to 12"),
        (["RUN", "--step=3", "--layers=dens_*"], RecipeError, "did you mean dense_0"),
        (["RUN", "--step=3", f"--out={__file__}"], DataError, "must be a folder, which is made if"),
        (["nowhere", "--step=3"], DataError, "there is no such run"),
    ],
)
def test_invalid_arguments_are_refused(
    args: list[str], error: type[Exception], problem: str, plain: Path
) -> None:
    with pytest.raises(error, match=problem) as caught:
        main([str(plain) if arg == "RUN" else arg for arg in args])
    assert getattr(caught.value, "exit_status", None) == 2


def test_run_without_any_step_is_refused(tmp_path: Path, plain: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes((plain / "recipe.yaml").read_bytes())
    with pytest.raises(DataError, match="has no checkpoints, so no step can be computed"):
        main([str(tmp_path), "--step=3"])


@pytest.mark.medium
def test_run_of_several_processes_is_opened_in_one(tiny: Callable[..., Recipe]) -> None:
    local = ("launch=local", "launch.processes=2", "launch.restarts=1", "launch.min_processes=1")
    opened = open_recipe(tiny(*MLP, "parallel.mode=data", "parallel.devices=2", *local))
    assert opened.recipe.launch.name == "auto"
    assert opened.recipe.parallel.num_devices == 1
