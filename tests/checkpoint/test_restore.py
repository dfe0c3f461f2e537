"""Arrays that orbax wrote, as earlier versions did, can be read, or the reading raises."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from pipeline.checkpoint.array_database import write_arrays
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.checkpoint.checkpointer import Checkpoints
from pipeline.checkpoint.host_state import HostState
from pipeline.checkpoint.manifest import DamagedError, write_manifest
from pipeline.checkpoint.restore import (
    Checkpoint,
    _silence_orbax,
    read_arrays,
    read_checkpoint,
    read_saved,
    read_weights_alone,
    set_others_aside,
)
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, RunError
from pipeline.stages.record.recorded_recipe import hash_recipe
from pipeline.stages.record.trained_run import list_changes, list_changes_of_meaning, restore_state
from tests import outcome
from tests.checkpoint.test_checkpointer import EVAL_ONLY, kept, state_of
from tests.whole_run import run

Compose = Callable[..., Recipe]

THIRD = make_checkpoint_path(Path("checkpoints"), 3)
ARRAYS = {"params/kernel": np.arange(6, dtype=np.float32), "step": np.int32(3)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of steps 1, 2 and 3, of arrays that take several files."""
    run_dir = tmp_path_factory.mktemp("saved")
    with Checkpoints(run_dir, kept(3, "loss"), {"seed": 1}) as checkpoints:
        for step in (1, 2, 3):
            state = state_of(step, kernel=noise(step), bias=np.zeros(3, np.float32))
            host = {"early_stop": {"waited": step}}
            checkpoints.save(step, state, host, {"loss": 1.0 / step})
    return run_dir


def noise(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(40, 40)).astype(np.float32)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def files_of(folder: Path) -> list[str]:
    """All of a checkpoint."""
    found = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return sorted(found)


def damages(content: bytes) -> Iterator[bytes | None]:
    """Missing, empty, truncated, longer, and one bit flipped in several places."""
    yield from (None, b"", content[: len(content) // 2], content + b"\0")
    for place in {0, len(content) // 3, len(content) // 2, len(content) - 1}:
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        yield bytes(flipped)


def write(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


@pytest.mark.slow
def test_damaged_file_is_named_and_not_read(copy: Path) -> None:
    folder = make_checkpoint_path(copy / "checkpoints", 3)
    names = files_of(folder)
    assert len(names) >= 8
    for name in names:
        content = (folder / name).read_bytes()
        for damaged in filter(lambda other: other != content, damages(content)):
            write(folder / name, damaged)
            with pytest.raises(DamagedError) as caught:
                read_checkpoint(folder)
            assert str(caught.value).startswith(f"{folder}/")
            assert name in str(caught.value) or name == "manifest.json"
        (folder / name).write_bytes(content)
    assert read_checkpoint(folder).step == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("host/metadata", None, rf"{THIRD}/host/metadata: is missing"),
        ("host/metadata", b"{}", rf"{THIRD}/host/metadata: has 2 bytes, not 29"),
        (
            "host/metadata",
            b'{"early_stop": {"waited": 4}}',
            "host/metadata: its SHA-256 doesn't match the manifest",
        ),
        ("manifest.json", None, rf"{THIRD}/manifest.json: can't be read: No such file"),
        ("manifest.json", b"{", rf"{THIRD}/manifest.json: must be JSON: Expecting property"),
        ("manifest.json", b"[1]", rf"{THIRD}/manifest.json: must be the manifest of a checkpoint"),
    ],
)
def test_message_has_the_reason(name: str, content: bytes | None, message: str, copy: Path) -> None:
    write(make_checkpoint_path(copy / "checkpoints", 3) / name, content)
    with pytest.raises(DataError, match=message):
        read_saved(make_checkpoint_path(copy / "checkpoints", 3))


def test_checkpoint_is_read_from_inside_and_by_a_link(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint_path(copy / "checkpoints", 2)
    (copy / "latest").symlink_to(checkpoint)
    assert read_saved(copy / "latest").step == 2
    monkeypatch.chdir(checkpoint)
    assert read_saved(Path()).step == 2


@pytest.mark.parametrize("read", [read_saved, read_weights_alone])
@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_folder_without_checkpoints_is_refused(
    name: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(DataError, match=f"{name}: holds no checkpoint; name a run directory, its"):
        read(tmp_path / name)


def test_weights_alone_are_of_the_newest_checkpoint_or_of_the_named(copy: Path) -> None:
    for step, folder in ((3, copy), (2, make_checkpoint_path(copy / "checkpoints", 2))):
        np.testing.assert_array_equal(
            read_weights_alone(folder)["params/dense/kernel"], noise(step)
        )


def test_link_is_refused(copy: Path) -> None:
    """It could name any file of this machine."""
    file = make_checkpoint_path(copy / "checkpoints", 3) / "host" / "metadata"
    content = file.read_bytes()
    file.unlink()
    (copy / "elsewhere").write_bytes(content)
    file.symlink_to(copy / "elsewhere")
    with pytest.raises(DamagedError, match="host/metadata: is a link"):
        read_checkpoint(make_checkpoint_path(copy / "checkpoints", 3))


def test_unlisted_file_is_named(copy: Path) -> None:
    folder = make_checkpoint_path(copy / "checkpoints", 3)
    (folder / "state" / "more").write_text("mine")
    with pytest.raises(DamagedError, match=r"3/state/more: isn't listed in manifest.json"):
        read_checkpoint(folder)


def test_fifo_is_named_and_not_waited_for(copy: Path) -> None:
    os.mkfifo(make_checkpoint_path(copy / "checkpoints", 3) / "state" / "pipe")
    with pytest.raises(DamagedError, match="3/state/pipe: must be a regular file"):
        read_checkpoint(make_checkpoint_path(copy / "checkpoints", 3))


def seal(folder: Path, **files: Any) -> None:
    """Make a manifest that agrees with what is there, as a stranger can; with these entries."""
    write_manifest(folder, hash_recipe({"seed": 1}))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] |= files
    kept = {name: entry for name, entry in manifest["files"].items() if entry is not None}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": kept}))


@pytest.mark.parametrize("name", ["state/_METADATA", "host/metadata", "recipe/metadata"])
def test_manifest_without_required_file_is_refused(name: str, copy: Path) -> None:
    folder = make_checkpoint_path(copy / "checkpoints", 3)
    seal(folder, **{name: None})
    with pytest.raises(DamagedError, match=f"3/manifest.json: doesn't list {name}"):
        read_checkpoint(folder)
    (folder / "manifest.json").write_text('{"recipe": "", "files": {}}')
    with pytest.raises(DamagedError, match=r"3/manifest.json: doesn't list state/_METADATA"):
        read_checkpoint(folder)


@pytest.mark.parametrize("entry", [5, {"bytes": 5}, {"bytes": "5", "sha256": ""}, {}])
def test_manifest_entry_must_be_size_and_digest(entry: Any, copy: Path) -> None:
    seal(make_checkpoint_path(copy / "checkpoints", 3), **{"host/metadata": entry})
    with pytest.raises(
        DamagedError, match=r"3/manifest.json: must be the manifest of a checkpoint"
    ):
        read_checkpoint(make_checkpoint_path(copy / "checkpoints", 3))


def test_invalid_host_state_is_damage(copy: Path) -> None:
    folder = make_checkpoint_path(copy / "checkpoints", 3)
    (folder / "host" / "metadata").write_text('{"early_stop": null}')
    seal(folder)
    with pytest.raises(DamagedError) as caught:
        read_checkpoint(folder)
    assert str(caught.value) == (
        f"{folder}/host/metadata: must be the state of a run: early_stop = null"
    )
    like = state_of(0, kernel=noise(0), bias=np.zeros(3, np.float32))
    state, _ = restore_state(copy, like, {"seed": 1}, lambda text: None) or (None, None)
    assert state is not None
    assert int(state.step) == 2


def test_non_object_recipe_is_damage(copy: Path) -> None:
    (make_checkpoint_path(copy / "checkpoints", 3) / "recipe" / "metadata").write_text("[]")
    seal(make_checkpoint_path(copy / "checkpoints", 3))
    with pytest.raises(DamagedError, match="recipe/metadata: must be a JSON object"):
        read_checkpoint(make_checkpoint_path(copy / "checkpoints", 3))


def test_checkpoint_renamed_to_another_step_is_damaged(copy: Path) -> None:
    root = copy / "checkpoints"
    (root / "3").rename(root / "8")
    with pytest.raises(DamagedError, match="8/state: was made at step 3"):
        read_checkpoint(root / "8")


def test_checkpoint_without_its_arrays_is_damaged(copy: Path) -> None:
    for step in "123":
        shutil.rmtree(make_checkpoint_path(copy / "checkpoints", step) / "state")
    with pytest.raises(DamagedError, match=r"none of its checkpoints can be read: .*is missing"):
        read_saved(copy)


def test_strangers_are_skipped_on_read_and_set_aside_on_resume(copy: Path) -> None:
    """Before the newest or after it: a run may save these steps, and removes none of them."""
    root = copy / "checkpoints"
    (root / "2019").mkdir()
    (root / "2019" / "holiday.jpg").touch()
    (root / "0").symlink_to(copy)
    assert read_saved(copy).step == 3
    warned: list[str] = []
    like = state_of(0, kernel=noise(0), bias=np.zeros(3, np.float32))
    assert restore_state(copy, like, {"seed": 1}, warned.append) is not None
    assert warned == []
    set_others_aside(copy, 3, warned.append)
    assert warned == [
        f"{root / '0'}: isn't a checkpoint; set aside as foreign-0-1",
        f"{root / '2019'}: isn't a checkpoint; set aside as foreign-2019-1",
    ]
    assert (root / "foreign-2019-1" / "holiday.jpg").exists()
    assert outcome.checkpoints(copy) == [1, 2, 3]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
@pytest.mark.parametrize("name", ["manifest.json", "state/_METADATA", "host/metadata"])
def test_unreadable_checkpoint_is_an_error_and_remains(
    name: str, number: int, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it is not taken either: hours would be done again."""
    file, opened = make_checkpoint_path(copy / "checkpoints", 3) / name, Path.open

    def refuse(path: Path, *more: Any, **named: Any) -> Any:
        if path == file:
            raise OSError(number, os.strerror(number), str(file))
        return opened(path, *more, **named)

    monkeypatch.setattr(Path, "open", refuse)
    like = state_of(0, kernel=noise(0), bias=np.zeros(3, np.float32))
    warned: list[str] = []
    message = rf"3/{name}: can't be read: {os.strerror(number)}; "
    for read in (
        lambda: restore_state(copy, like, {"seed": 1}, warned.append),
        lambda: read_saved(copy, warned.append),
    ):
        with pytest.raises(RunError, match=message) as caught:
            read()
        assert caught.value.exit_status == 1
    assert warned == []
    assert sorted(os.listdir(copy / "checkpoints")) == ["1", "2", "3"]


def test_other_spellings_of_a_step_are_set_aside_on_resume(copy: Path) -> None:
    root = copy / "checkpoints"
    for name in ("03", "+3", "3.0"):
        shutil.copytree(root / "3", root / name)
    warned: list[str] = []
    like = state_of(0, kernel=noise(0), bias=np.zeros(3, np.float32))
    assert restore_state(copy, like, {"seed": 1}, warned.append) is not None
    set_others_aside(copy, 3, warned.append)
    assert warned == [
        f"{root / name}: isn't a checkpoint; set aside as foreign-{name}-1"
        for name in ("+3", "03", "3.0")
    ]
    assert outcome.checkpoints(copy) == [1, 2, 3]


def test_non_ascii_digit_is_not_a_step(copy: Path) -> None:
    (copy / "checkpoints" / "²").mkdir()
    with pytest.raises(DataError, match="²: holds no checkpoint"):
        read_saved(copy / "checkpoints" / "²")


def test_resume_uses_earlier_checkpoint_and_saves_step_again(copy: Path) -> None:
    write(make_checkpoint_path(copy / "checkpoints", 3) / "host" / "metadata", b"{}")
    warned: list[str] = []
    like = state_of(0, kernel=noise(0), bias=np.zeros(3, np.float32))
    state, host = restore_state(copy, like, {"seed": 1}, warned.append) or (None, None)
    assert outcome.checkpoints(copy) == [1, 2, 3]
    set_others_aside(copy, 2, warned.append)
    assert state is not None
    assert host is not None
    assert (int(state.step), host.early_stop.waited) == (2, 2)
    root = copy / "checkpoints"
    assert warned == [
        f"{root / '3' / 'host' / 'metadata'}: has 2 bytes, not 29; using the checkpoint of step 2",
        f"{root / '3'}: set aside as damaged-3-1",
    ]
    assert outcome.checkpoints(copy) == [1, 2]
    with Checkpoints(copy, kept(3, "loss")) as checkpoints:
        checkpoints.save(3, state_of(3), {"early_stop": {"waited": 7}}, None)
    assert outcome.checkpoints(copy) == [1, 2, 3]
    assert read_checkpoint(root / "3").host.early_stop.waited == 7


def test_weights_are_restored_from_earlier_checkpoint_without_renames(copy: Path) -> None:
    (make_checkpoint_path(copy / "checkpoints", 3) / "recipe" / "metadata").unlink()
    warned: list[str] = []
    assert read_saved(copy, warned.append).step == 2
    assert len(warned) == 1
    assert outcome.checkpoints(copy) == [1, 2, 3]


def test_error_without_readable_checkpoint_names_all(copy: Path) -> None:
    for step in (1, 2, 3):
        (make_checkpoint_path(copy / "checkpoints", step) / "host" / "metadata").unlink()
    with pytest.raises(DataError) as caught:
        restore_state(copy, state_of(0), {"seed": 1}, print)
    root = copy / "checkpoints"
    listed = "; ".join(f"{root / step / 'host' / 'metadata'}: is missing" for step in "321")
    assert str(caught.value) == (
        f"{root}: none of its checkpoints can be read: {listed}; to start over, move that folder "
        "elsewhere"
    )
    assert outcome.checkpoints(copy) == [1, 2, 3]


def test_array_larger_than_memory_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 64)
    folder = make_checkpoint_path(copy / "checkpoints", 3)
    with pytest.raises(
        DamagedError, match=r"3/state: can't be read: claims 6,4\d\d bytes of arrays"
    ):
        read_checkpoint(folder)


@pytest.mark.slow
def test_resume_with_another_recipe_is_refused(tiny: Compose, tmp_path: Path) -> None:
    with Checkpoints(tmp_path, kept(1, None), tiny().model_dump(mode="json")) as checkpoints:
        checkpoints.save(3, state_of(3), {}, None)
    other = tiny("seed=5", "stages=[data,build,compile,train]", "train.steps=99").model_dump(
        mode="json"
    )
    with pytest.raises(RecipeError) as caught:
        restore_state(tmp_path, state_of(0), other, print)
    where = make_checkpoint_path(tmp_path / "checkpoints", 3)
    assert caught.value.problems == (f"seed = 5: was 1 in {where}",)


@pytest.mark.slow
@pytest.mark.mlp
def test_warm_start_lists_changed_layers_and_inputs(tiny: Compose, tmp_path: Path) -> None:
    length = "train.steps=7"
    run(tiny(length), tmp_path / "one")
    restore = f"checkpoint.restore={tmp_path / 'one'}"
    for name, ops in {"same": [], "other": ["dataset.eval.ops.1.factor=0.5"]}.items():
        run(tiny(length, restore, EVAL_ONLY, "seed=5", *ops), tmp_path / name)
    warnings = {
        name: [
            line.partition("warning    ")[2]
            for line in (tmp_path / name / "run.log").read_text().splitlines()
            if " warning " in line and "never predicted" not in line
        ]
        for name in ("same", "other")
    }
    where = make_checkpoint_path(tmp_path / "one" / "checkpoints", 7)
    change = "dataset.eval.ops.1.factor = 0.5: was 0.00392156862745098"
    assert warnings == {"same": [], "other": [f"{where}: trained by another recipe: {change}"]}


def test_fine_tuning_does_not_change_the_meaning_of_weights() -> None:
    trained: dict[str, Any] = {
        "name": "first",
        "seed": 1,
        "dataset": {"name": "mnist", "eval": {"ops": [{"name": "rescale", "factor": 0.1}]}},
        "model": {"name": "lenet5", "activation": "relu", "init": {"rules": []}},
        "train": {"freeze": [], "optimizer": {"lr": 0.1}},
    }
    saved = Checkpoint(Path("run"), {}, HostState(), trained)
    tuned = {**trained, "name": "second", "seed": 2}
    tuned["train"] = {"freeze": ["conv_*"], "unfreeze": ["conv_*"], "optimizer": {"lr": 0.01}}
    tuned["model"] = {**trained["model"], "init": {"rules": [{"pattern": "dense_*"}]}}
    other_ops = {"eval": {"ops": [{"name": "rescale", "factor": 0.2}]}}
    assert list_changes(saved, tuned) != []
    assert list_changes_of_meaning(saved, tuned) == []
    on_others = {**tuned, "dataset": {"name": "digits", **other_ops}}
    assert list_changes_of_meaning(saved, on_others) == []
    otherwise_read = {**tuned, "dataset": {"name": "mnist", **other_ops}}
    assert list_changes_of_meaning(saved, otherwise_read) == [
        "dataset.eval.ops.0.factor = 0.2: was 0.1"
    ]
    with_gelu = {**tuned, "model": {**trained["model"], "activation": "gelu"}}
    assert list_changes_of_meaning(saved, with_gelu) == ["model.activation = gelu: was relu"]


@pytest.mark.slow
def test_unfit_weights_are_refused_with_differing_keys(tiny: Compose, tmp_path: Path) -> None:
    length = "train.steps=7"
    run(tiny(length), tmp_path / "one")
    restore = f"checkpoint.restore={tmp_path / 'one'}"
    with pytest.raises(DataError, match=r"of another recipe: .*; model.name = mlp: was lenet5"):
        run(tiny(length, restore, "model.name=mlp", "+model.hidden=[4]"), tmp_path / "two")


def test_checkpoint_of_an_earlier_layout_gives_weights_but_is_not_resumed(tmp_path: Path) -> None:
    """Versions without `train.features` had the loss scale and the averages at the top."""
    arrays = {
        "step": np.int32(3),
        "loss_scale": np.float32(1),
        "params": {"a": np.zeros(2, np.float32)},
        "average": {"a": np.ones(2, np.float32)},
        "batch_stats": {"n": np.full(2, 2, np.float32)},
    }
    with Checkpoints(tmp_path, kept(3, None)) as checkpoints:
        checkpoints.save(3, arrays, {}, None)  # type: ignore[arg-type]
    weights = read_saved(tmp_path).select_weights()
    assert {path: array.tolist() for path, array in weights.items()} == {
        "params/a": [1, 1],
        "batch_stats/n": [2, 2],
    }
    with pytest.raises(DataError, match=r"saved by an earlier version.*checkpoint\.restore="):
        restore_state(tmp_path, state_of(0), {}, print)


def write_with_orbax(folder: Path) -> None:
    """Write `ARRAYS` as earlier versions did."""
    tree = {name: np.asarray(array) for name, array in ARRAYS.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))


def test_arrays_round_trip(tmp_path: Path) -> None:
    write_with_orbax(tmp_path / "state")
    read = read_arrays(tmp_path / "state")
    assert read.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(read[name], array)


STRANGE_NAMES = (
    "a[1]",
    "a*b",
    "a?b",
    "a\\b",
    "[",
    "a\udcffb",
    "a\nb",
    "a%41",
    "{x}",
    " a ",
    "#a",
    "a:b",
)


@pytest.mark.parametrize("writes_with_orbax", [True, False], ids=["orbax", "database"])
@pytest.mark.parametrize("name", STRANGE_NAMES, ids=range(len(STRANGE_NAMES)))
def test_arrays_are_read_in_any_folder(name: str, writes_with_orbax: bool, tmp_path: Path) -> None:
    """Orbax would take some of these names for patterns, which match the neighbours too."""
    for other in ("a1", "axb", "ab"):
        write_arrays(tmp_path / other / "state", {"step": np.int32(7)})
    folder = tmp_path / name
    if writes_with_orbax:
        write_with_orbax(tmp_path / "plain" / "state")
        (tmp_path / "plain").rename(folder)
    else:
        write_arrays(folder / "state", ARRAYS)
    np.testing.assert_array_equal(read_arrays(folder / "state")["step"], ARRAYS["step"])
    assert os.listdir(folder) == ["state"]
    for other in ("a1", "axb", "ab"):
        np.testing.assert_array_equal(read_arrays(tmp_path / other / "state")["step"], 7)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Errors that orbax raises when it is next asked to restore, one a time."""
    refusals: list[Exception] = []
    restore = ocp.StandardCheckpointer.restore

    def refuse(*arguments: Any, **named: Any) -> Any:
        if refusals:
            raise refusals.pop(0)
        return restore(*arguments, **named)

    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", refuse)
    return refusals


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        ValueError("RESOURCE_EXHAUSTED: Failed to open: Too many open files [os_error_code='24']"),
    ],
)
def test_lack_of_descriptors_is_not_damage(
    error: Exception, refusals: list[Exception], tmp_path: Path
) -> None:
    write_with_orbax(tmp_path / "state")
    refusals.append(error)
    with pytest.raises(RunError, match=r"state: can't be read: Too many open files; ") as caught:
        read_arrays(tmp_path / "state")
    assert caught.value.exit_status == 1


def test_transient_orbax_error_is_retried_once(refusals: list[Exception], tmp_path: Path) -> None:
    """It takes a file for missing where the process could not open it."""
    write_with_orbax(tmp_path / "state")
    hidden = AttributeError("'NoneType' object has no attribute 'tree'")
    refusals.append(hidden)
    assert read_arrays(tmp_path / "state").keys() == ARRAYS.keys()
    refusals.extend([hidden, hidden])
    with pytest.raises(DamagedError, match="state: can't be read: 'NoneType' object"):
        read_arrays(tmp_path / "state")


@pytest.mark.parametrize("writes_with_orbax", [True, False], ids=["orbax", "database"])
def test_messages_of_absl_are_logged_after_a_read(
    writes_with_orbax: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are of the program that calls this one, and orbax's own aren't logged."""
    absl = logging.getLogger("absl")
    level = absl.level
    if writes_with_orbax:
        write_with_orbax(tmp_path / "state")
        for file in (tmp_path / "state").rglob("d/*"):
            file.unlink()
        caplog.clear()
        with pytest.raises(DamagedError):
            read_arrays(tmp_path / "state")
    else:
        write_arrays(tmp_path / "state", ARRAYS)
        read_arrays(tmp_path / "state")
    assert absl.level == level
    assert not [record for record in caplog.records if record.name == "absl"]
    absl.warning("mine")
    assert caplog.records[-1].getMessage() == "mine"


def test_calls_of_closed_event_loops_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensorstore's threads make them after an error; errors of others are still shown."""
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    with _silence_orbax(), _silence_orbax():
        pass
    for text in ("Event loop is closed", "someone else's"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))  # type: ignore[arg-type]
    assert [str(each.exc_value) for each in shown] == ["someone else's"]
