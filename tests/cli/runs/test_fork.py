"""Forks of runs: unchanged keys give the run's bits, and what can't go on is refused."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import run
from pipeline.checkpoint.checkpoint_folder import FOLDER, make_checkpoint_path
from pipeline.checkpoint.restore import read_checkpoint
from pipeline.core.errors import DataError, PipelineError, RecipeError, RunError, UsageError
from pipeline.stages import fork as stages_fork
from pipeline.stages.record.provenance import read_provenance
from tests.command_line import dump
from tests.command_line import fork as fork_command
from tests.conftest import MLP, compose_tiny

KEYS = (*MLP, "train.steps=8", "train.sink_size=4", "checkpoint.every_steps=3")
EVALUATED = ("eval.every_steps=2", "monitor.early_stop.metric=loss", "train.schedule.name=constant")
PRIVATE = "+privacy={noise: 1.0, delta: 1.0e-3, expected_batch_size: 1, accountant: rdp}"
pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with checkpoints of the steps 3, 6 and 8."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(compose_tiny(cache, *KEYS, *EVALUATED), folder).status == "done"
    return folder


@pytest.fixture
def fork(cache: Path) -> Callable[..., int]:
    """Fork a run into a folder; keys of the command line, such as the cache, are set again."""

    def call(place: str, folder: Path, *words: str) -> int:
        return fork_command([place, f"cache.root={cache}", *words, f"--out={folder}"])

    return call


Fork = Callable[..., int]


def read_files(run_dir: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in list_files(run_dir)}


def list_files(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.rglob("*") if path.is_file()]


def assert_same_results(one: Path, other: Path) -> None:
    """Logs and recipe have equal bytes, the newest checkpoints equal arrays and host states."""
    for name in ("metrics.jsonl", "evals.jsonl", "recipe.yaml", "lowerings.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    step = len((one / "metrics.jsonl").read_text().splitlines())
    mine, yours = (
        read_checkpoint(make_checkpoint_path(run_dir / FOLDER, step)) for run_dir in (one, other)
    )
    assert mine.arrays.keys() == yours.arrays.keys()
    assert all(mine.arrays[name].tobytes() == yours.arrays[name].tobytes() for name in mine.arrays)
    assert mine.host == yours.host
    assert mine.recipe == yours.recipe


@pytest.mark.parametrize("step", [0, 3, 7])
def test_fork_without_changes_ends_with_the_bits_of_the_run(
    fork: Fork, trained: Path, tmp_path: Path, step: int
) -> None:
    """From a checkpoint, from the start and from a step that is replayed."""
    before = read_files(trained)
    assert fork(f"{trained}@{step}", tmp_path / "fork") == 0
    assert_same_results(trained, tmp_path / "fork")
    assert read_files(trained) == before


def test_fork_of_a_done_run_is_a_longer_run(
    fork: Fork, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evaluation at the end of the shorter run isn't one of the longer run."""
    keys = (*KEYS, *EVALUATED, "eval.every_steps=3")
    run(compose_tiny(cache, *keys), tmp_path / "run")
    assert fork(f"{tmp_path / 'run'}@end", tmp_path / "fork", "train.steps=13") == 0
    assert "would have changed" not in capsys.readouterr().out
    run(compose_tiny(cache, *keys, "train.steps=13"), tmp_path / "longer")
    assert_same_results(tmp_path / "longer", tmp_path / "fork")


def test_fork_records_its_origin(
    fork: Fork, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "fork"
    words = ["train.batch_size=12", "train.steps=10", "seed=7", "--json"]
    assert fork(f"{trained}@4", folder, *words) == 0
    output = capsys.readouterr()
    facts = json.loads(output.out)
    assert re.search(
        r"train\.batch_size.*: would have changed steps up to 4 too, which stay as the run made "
        r"them; later steps have the new values",
        output.err,
    )
    origin = {"run": str(trained), "step": 4, "changed": facts["changed"]}
    assert facts["changed"]["seed"] == {"was": 1, "is": 7}
    assert facts["fork"] == str(folder)
    run_process, fork_process, training = read_provenance(folder)
    assert "fork" not in run_process
    assert "fork" not in training
    assert fork_process["fork"] == origin
    logs = [(path / "metrics.jsonl").read_text().splitlines() for path in (trained, folder)]
    assert logs[0][:4] == logs[1][:4]
    assert len(logs[1]) == 10
    # Its later steps can be opened, and those of the run are named.
    assert dump([str(folder), "--step=6"]) == 0
    with pytest.raises(RunError, match=f"it is a fork, whose steps up to 4 are those of {trained}"):
        dump([str(folder), "--step=2"])


def test_stopped_fork_is_resumed(fork: Fork, trained: Path, cache: Path, tmp_path: Path) -> None:
    """A fork is a run directory from its first moment, so it goes on as any run."""
    folder = tmp_path / "fork"
    assert fork(f"{trained}@4", folder) == 0
    shutil.rmtree(folder / FOLDER / "8")
    shutil.rmtree(folder / FOLDER / "6")
    run(compose_tiny(cache, *KEYS, *EVALUATED, f"train.resume={folder}"))
    assert_same_results(trained, folder)


def test_early_stop_counts_the_evaluations_of_the_run(
    fork: Fork, trained: Path, tmp_path: Path
) -> None:
    """The fork sets another metric, whose evaluations are in the log."""
    folder = tmp_path / "fork"
    keys = [
        "monitor.early_stop.metric=accuracy",
        "monitor.early_stop.min_delta=1",
        "monitor.early_stop.patience=3",
    ]
    assert fork(f"{trained}@7", folder, "train.steps=20", *keys) == 0
    # The first evaluation is the best one, and those at 4, 6 and 8 are no better by 1.
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 8
    assert summary["reason"].startswith("early stop: accuracy no better")


Edit = Callable[[Path], object]


def change_data(run_dir: Path) -> None:
    file = run_dir / "provenance.json"
    tree: Any = json.loads(file.read_text())
    tree["processes"][0]["data"]["train"]["image"]["sha256"] = "0" * 64
    file.write_text(json.dumps(tree))


def remove_results(run_dir: Path) -> None:
    shutil.rmtree(run_dir / FOLDER)
    (run_dir / "metrics.jsonl").unlink()


def change_number(run_dir: Path) -> None:
    log = run_dir / "metrics.jsonl"
    log.write_text(re.sub(r'"loss": [^,]*', '"loss": 1.25', log.read_text()))


@pytest.mark.parametrize(
    ("place", "words", "edit", "error", "message"),
    [
        ("", [], None, UsageError, r"run: must be RUN_DIR@N with a step of the run, 0 or more, or"),
        ("@-1", [], None, UsageError, r"run@-1: must be RUN_DIR@N"),
        ("@last", [], None, UsageError, r"run@last: must be RUN_DIR@N"),
        ("@9", [], None, DataError, r"run: step 9: must be from 0 to 8, the last step that the"),
        ("@end", [], None, RecipeError, r"train: 8 steps in all, and the fork begins after step 8"),
        ("@3", ["train.resume=x"], None, UsageError, r"train\.resume=x: can't be set"),
        ("@3", ["nonsense=4"], None, RecipeError, r"nonsense = 4: there is no such key"),
        (
            "@3",
            ["optimizer=adam"],
            None,
            RecipeError,
            r"train\.optimizer\.name.* the state has other arrays: .* is missing.*; steps of the "
            r"run that could be kept: none",
        ),
        ("@3", ["train.ema.decay=0.5"], None, RecipeError, r"could be kept: none"),
        ("@3", ["stages=[data,build]"], None, RecipeError, r"stages: must have train and check"),
        ("@3", [], change_data, DataError, r"the data have changed since the run was trained"),
        ("@4", [], change_number, RunError, r"step 4 can't be computed: .*can't|differ"),
        ("@4", [], remove_results, DataError, r"has no checkpoints, so no step can be computed"),
    ],
)
def test_fork_that_cannot_begin_writes_nothing(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    words: list[str],
    edit: Edit | None,
    error: type[PipelineError],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    if edit is not None:
        edit(Path("run"))
    before = read_files(tmp_path)
    with pytest.raises(error, match=message):
        fork_command([f"run{place}", *words])
    assert read_files(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_folder_that_is_not_empty_is_refused(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="holds other files than a run's: file"):
        fork_command([f"{trained}@3", f"--out={tmp_path}"])
    with pytest.raises(UsageError, match="must be a new or an empty folder"):
        fork_command([f"{trained}@3", f"--out={trained}"])


def test_fork_that_cannot_be_written_leaves_nothing(
    fork: Fork, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even in a folder that was made for it, which a second try can use."""
    (tmp_path / "fork").mkdir()

    of_another = tmp_path / "fork" / "of another"

    def fill_disk(*_: Any) -> None:
        of_another.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(stages_fork, "write_recipe", fill_disk)
        with pytest.raises(RunError, match=r"fork: can't be written: No space left on device"):
            fork(f"{trained}@3", tmp_path / "fork")
    assert {path.name for path in (tmp_path / "fork").iterdir()} == {".lock", of_another.name}
    of_another.unlink()
    assert fork(f"{trained}@3", tmp_path / "fork") == 0


def test_folder_that_cannot_be_made_is_refused_before_the_replay(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="must be in a folder"):
        fork_command([f"{trained}@7", f"--out={tmp_path / 'file' / 'fork'}"])
    assert "replay" not in capsys.readouterr().out


def test_fork_of_a_run_with_adapters_has_its_bits(fork: Fork, cache: Path, tmp_path: Path) -> None:
    """Checkpoints have the adapters alone, those of the fork too."""
    adapters = "train.features=[{name: lora, rank: 2, targets: ['*']}]"
    run(compose_tiny(cache, *KEYS, "train.schedule.name=constant", adapters), tmp_path / "run")
    assert fork(f"{tmp_path / 'run'}@4", tmp_path / "fork") == 0
    assert_same_results(tmp_path / "run", tmp_path / "fork")


def test_run_without_checkpoints_is_replayed_from_the_start(
    fork: Fork, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    shutil.rmtree(run_dir / FOLDER)
    assert fork(f"{run_dir}@5", tmp_path / "fork") == 0
    printed = capsys.readouterr().out
    assert re.search(r"5 steps from the start, [\d.]+ s by the run's times", printed)
    assert_same_results(trained, tmp_path / "fork")


def test_callbacks_are_known_at_checkpoints_only(fork: Fork, cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    callbacks = "train.callbacks=[{name: stop_at, metric: accuracy, value: 2}]"
    run(compose_tiny(cache, *KEYS, *EVALUATED, callbacks), run_dir)
    with pytest.raises(DataError, match="what its callbacks had remembered there is unknown; it"):
        fork_command([f"{run_dir}@4"])
    assert fork(f"{run_dir}@3", tmp_path / "fork") == 0
    assert_same_results(run_dir, tmp_path / "fork")


def test_private_run_is_refused(cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run(compose_tiny(cache, *KEYS, PRIVATE), run_dir)
    with pytest.raises(RecipeError, match="privacy: must be null for fork"):
        fork_command([f"{run_dir}@3"])
