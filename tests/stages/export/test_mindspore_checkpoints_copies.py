"""A run that writes MindSpore's files beside its checkpoints: prefix, directory, keep (K-01)."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto.graph_pb2 import GraphDef

from pipeline import load_recipe
from pipeline.checkpoint import checkpointer
from pipeline.checkpoint.checkpoint_folder import FOLDER, list_saved_steps, make_checkpoint_path
from pipeline.checkpoint.checkpointer import Checkpoints
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.files.atomic_write import commit
from pipeline.engine.monitors.tensorboard import BoardNode, encode_graph
from pipeline.models.weights.files.weight_files import read_weights
from pipeline.stages.export import mindspore_checkpoints
from pipeline.stages.export.mindspore_checkpoints import MindSporeCopies
from tests import outcome
from tests.checkpoint.test_checkpointer import kept, state_of
from tests.conftest import compose_tiny
from tests.whole_run import run

STEPS_PER_SINK_EPOCH = 10


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def copies_in(run_dir: Path, shared: Path | None, prefix: str = "net") -> MindSporeCopies:
    return MindSporeCopies(run_dir, shared, prefix, STEPS_PER_SINK_EPOCH)


def save(
    run_dir: Path, folder: Path | None, *steps: int, prefix: str = "net", newest: int = 2
) -> None:
    run_dir.mkdir(exist_ok=True)
    copies = copies_in(run_dir, folder, prefix)
    with Checkpoints(run_dir, kept(newest, None), copies=[copies]) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step), {}, None)


@pytest.mark.slow
def test_run_writes_a_file_for_each_retained_checkpoint(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def encode(nodes: Sequence[BoardNode]) -> bytes:
        threads.append(threading.current_thread())
        return encode_graph(nodes)

    monkeypatch.setattr("pipeline.stages.runner.checkpoint_copies.encode_graph", encode)
    mlp = ("model=mlp", "model.hidden=[8]", "train.steps=24", "train.sink_size=10")
    keys = ("checkpoint.every_steps=10", "checkpoint.keep=2", "checkpoint.prefix=resnet50")
    out, run_dir = tmp_path / "out", tmp_path / "run"
    run(compose_tiny(cache, *mlp, *keys, f"checkpoint.directory={out}"), run_dir)
    files = ["resnet50-2_10.ckpt", "resnet50-3_4.ckpt", "resnet50-graph.meta"]
    assert names(out) == [".resnet50.claim", *files]
    arrays, saved = read_weights(out / "resnet50-3_4.ckpt"), outcome.arrays(run_dir)
    assert arrays
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, saved[f"params/{name}"])
    graph = GraphDef.FromString((out / "resnet50-graph.meta").read_bytes())  # K-03
    nodes = {node.name: node for node in graph.node}
    assert {"input", "output", *arrays} <= nodes.keys()
    # The package of TensorBoard can't be imported by two threads at once.
    assert threads
    assert threading.main_thread() not in threads
    assert nodes["dense_0/dot_general"].op == "dot_general"


@pytest.mark.slow
def test_optimizer_is_saved_on_request(cache: Path, tmp_path: Path) -> None:
    """K-02: the content of the files can be selected."""
    mlp = ("model=mlp", "model.hidden=[8]", "train.steps=24", "train.sink_size=10")
    run(compose_tiny(cache, *mlp, "checkpoint.prefix=net", "checkpoint.optimizer=true"), tmp_path)
    arrays, saved = read_weights(tmp_path / "ckpt" / "net-3_4.ckpt"), outcome.arrays(tmp_path)
    params = [path.removeprefix("params/") for path in saved if path.startswith("params/")]
    assert params
    assert {*params, *(f"moments.{path}" for path in params), "global_step"} <= arrays.keys()
    assert arrays["global_step"].item() == 24
    moments = {path: array for path, array in saved.items() if "trace" in path}
    for path in params:
        (moment,) = (array for name, array in moments.items() if name.endswith(path))
        np.testing.assert_array_equal(arrays[f"moments.{path}"], moment)


@pytest.mark.medium
def test_files_are_retained_like_checkpoints(tmp_path: Path) -> None:
    """Without a directory they lie in the run's."""
    save(tmp_path, None, 5, 10, 15)
    assert names(tmp_path / "ckpt") == ["net-1_10.ckpt", "net-2_5.ckpt"]


@pytest.mark.parametrize("problem", ["full disk", "damage"])
def test_failed_copy_fails_the_save_and_removes_nothing(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older checkpoint and its copy are the last sound ones."""

    def fill_disk(file: Path, arrays: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def damage(*arguments: Any, **named: Any) -> None:
        commit(*arguments, **named)
        arrays = next(path for path in arguments[1].rglob("*/d/*") if path.is_file())
        arrays.write_bytes(bytes(arrays.stat().st_size))

    save(tmp_path, None, 5)
    if problem == "full disk":
        monkeypatch.setattr(mindspore_checkpoints, "write_weights", fill_disk)
    else:
        monkeypatch.setattr(checkpointer, "commit", damage)
    with pytest.raises(RunError, match=r"can't save step 10: .*(No space|SHA-256)"):
        save(tmp_path, None, 10, newest=1)
    assert list_saved_steps(tmp_path / FOLDER) == [5, 10]
    assert names(tmp_path / "ckpt") == ["net-1_5.ckpt"]


@pytest.mark.medium
def test_used_prefix_gets_a_number_and_a_resumed_run_keeps_its_prefix(
    tmp_path: Path,
) -> None:
    shared = tmp_path / "shared"
    for run_dir in ("one", "two"):
        save(tmp_path / run_dir, shared, 5)
    save(tmp_path / "two", shared, 10, 15)
    assert [name for name in names(shared) if name.endswith(".ckpt")] == [
        "net-1_5.ckpt",
        "net_1-1_10.ckpt",
        "net_1-2_5.ckpt",
    ]


def test_concurrent_runs_have_separate_files(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    both = [copies_in(tmp_path / name, shared) for name in made(tmp_path)]
    for run_dir, copies in zip(made(tmp_path), both, strict=True):
        with Checkpoints(tmp_path / run_dir, kept(2, None), copies=[copies]) as checkpoints:
            checkpoints.save(5, state_of(5), {}, None)
    assert names(shared) == [".net.claim", ".net_1.claim", "net-1_5.ckpt", "net_1-1_5.ckpt"]


def test_run_resumes_with_its_prefix_after_claims_and_files_of_others(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    for name in made(tmp_path):
        copies_in(tmp_path / name, shared)
    (shared / "net_1-1_5.ckpt").touch()
    for steps in ((5,), (10, 15)):
        save(tmp_path / "three", shared, *steps)
    files = [path.name for path in sorted(shared.glob("net*.ckpt"))]
    assert files == ["net_1-1_5.ckpt", "net_2-1_10.ckpt", "net_2-2_5.ckpt"]


def made(folder: Path) -> tuple[str, str]:
    for name in ("one", "two"):
        (folder / name).mkdir(exist_ok=True)
    return "one", "two"


@pytest.mark.medium
def test_kill_between_a_checkpoint_and_its_file_is_repaired(tmp_path: Path) -> None:
    save(tmp_path, None, 5, 10)
    (tmp_path / "ckpt" / "net-1_5.ckpt").unlink()
    shutil.rmtree(make_checkpoint_path(tmp_path / "checkpoints", 10))
    save(tmp_path, None)
    assert names(tmp_path / "ckpt") == ["net-1_5.ckpt"]


def test_moved_run_continues_with_its_names(tmp_path: Path) -> None:
    save(tmp_path / "one", None, 5)
    (tmp_path / "one").rename(tmp_path / "two")
    save(tmp_path / "two", None, 10)
    assert names(tmp_path / "two" / "ckpt") == ["net-1_10.ckpt", "net-1_5.ckpt"]


def test_list_with_foreign_files_removes_nothing(tmp_path: Path) -> None:
    mine = tmp_path / "ckpt" / "mine.ckpt"
    mine.parent.mkdir()
    mine.touch()
    files = {"5": "mine.ckpt", "6": "../net-1_1.ckpt", "9" * 5000: "net-1_1.ckpt"}
    kept_names = {"folder": None, "prefix": "net", "files": files}
    (tmp_path / "ckpt.json").write_text(json.dumps(kept_names))
    copies_in(tmp_path, None).remove(5)
    assert mine.exists()


@pytest.mark.parametrize("text", ["[]", "{", '{"files": 3}'])
def test_invalid_list_is_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / "ckpt.json").write_text(text)
    with pytest.raises(RunError, match=r"ckpt\.json: "):
        copies_in(tmp_path, None)


def test_uncreatable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"checkpoint\.directory = .*file/in: can't be written: Not"):
        copies_in(tmp_path, tmp_path / "file" / "in")


def test_prefix_with_folders_is_refused() -> None:
    with pytest.raises(RecipeError, match="prefix = a/b: must be the beginning of a file's"):
        load_recipe("lenet5_digits", ["checkpoint.prefix=a/b"])
