"""Mirrors of checkpoints in a local folder, on a store that fails, and after an interruption."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    MANIFEST,
    make_checkpoint_path,
    remove_checkpoint,
)
from pipeline.checkpoint.manifest import verify_files, write_manifest
from pipeline.checkpoint.mirror import DRAFT, OWNER, Mirror, MirroredRun, read_mirror
from pipeline.checkpoint.retention import add_metrics
from pipeline.core.errors import DataError, RunError
from pipeline.core.files import storage
from pipeline.core.files.storage import Storage, open_storage

FILES = ("metrics.jsonl", "recipe.yaml", "none.json")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "WAITS_S", (0.0,))


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run with two logs and checkpoints of the steps 10 and 20."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("one\n")
    (folder / "recipe.yaml").write_text("seed: 1\n")
    for step in (10, 20):
        save(folder, step)
    yield folder
    assert not (folder / DRAFT).exists()


def save(run_dir: Path, step: int) -> Path:
    folder = make_checkpoint_path(run_dir / FOLDER, step)
    for name in ("state/_METADATA", "state/d/array", "host/metadata", "recipe/metadata"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of {step}")
    write_manifest(folder, "digest")
    return folder


def store_of(tmp_path: Path) -> Storage:
    return open_storage(f"file://{tmp_path}/store")


def mirror_of(tmp_path: Path, run_dir: Path, warnings: list[str] | None = None) -> Mirror:
    store = store_of(tmp_path)
    mirrored = read_mirror(store) or MirroredRun(store, "me", {})
    warn = [].append if warnings is None else warnings.append
    return Mirror(mirrored, run_dir, FILES, warn)


def read(tmp_path: Path) -> MirroredRun:
    mirrored = read_mirror(store_of(tmp_path))
    assert mirrored is not None
    return mirrored


def restore(tmp_path: Path) -> tuple[Path, list[str]]:
    target = tmp_path / "restored"
    target.mkdir()
    warnings: list[str] = []
    read(tmp_path).restore(target, warnings.append)
    return target, warnings


def read_tree(folder: Path) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def test_restored_run_is_byte_identical(tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir) as mirror:
        pass
    assert mirror.failure is None
    assert sorted(read(tmp_path).records) == [10, 20]
    assert read(tmp_path).newest == 20
    restored, warnings = restore(tmp_path)
    assert read_tree(restored) == read_tree(run_dir)
    assert warnings == []
    verify_files(make_checkpoint_path(restored / FOLDER, 20))


def test_mirror_follows_added_and_removed_files(tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir) as mirror:
        mirror.add(save(run_dir, 30))
        (run_dir / "metrics.jsonl").write_text("one\ntwo\n")
        remove_checkpoint(make_checkpoint_path(run_dir / FOLDER, 10))
        mirror.remove(10)
    assert sorted(read(tmp_path).records) == [20, 30]
    assert not any(name.startswith("10/") for name in store_of(tmp_path).list_files())
    # A checkpoint that is saved again, and metrics that are added later.
    before = read_tree(make_checkpoint_path(run_dir / FOLDER, 20))
    save(run_dir, 20)
    add_metrics(make_checkpoint_path(run_dir / FOLDER, 30), {"loss": 1.0})
    assert read_tree(make_checkpoint_path(run_dir / FOLDER, 20)) != before
    with mirror_of(tmp_path, run_dir):
        pass
    restored, _ = restore(tmp_path)
    assert read_tree(restored) == read_tree(run_dir)


def test_files_are_copied_without_hard_links(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", refuse)
    with mirror_of(tmp_path, run_dir):
        pass
    assert sorted(read(tmp_path).records) == [10, 20]


@pytest.mark.parametrize("number", range(1, 16))
def test_interrupted_copy_is_never_read(
    number: int, tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies before its write of this number, and half of the file may be there."""
    with mirror_of(tmp_path, run_dir):
        pass
    earlier = read_tree(make_checkpoint_path(run_dir / FOLDER, 20))
    save(run_dir, 20)
    save(run_dir, 30)
    count = 0
    for name in ("upload", "write"):
        action = getattr(Storage, name)

        def die(self: Storage, first: Path | str, second: str | bytes, action=action) -> None:
            nonlocal count
            count += 1
            if count < number:
                action(self, first, second)
            elif count == number:
                target, content = (first, second) if isinstance(second, bytes) else (second, b"ha")
                (tmp_path / "store" / str(target)).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "store" / str(target)).write_bytes(content[: len(content) // 2])
            if count >= number:
                raise RunError("dead")

        monkeypatch.setattr(Storage, name, die)
    try:
        with mirror_of(tmp_path, run_dir):
            pass
    except RunError:
        assert number == 1
    monkeypatch.undo()
    mirrored = read_mirror(store_of(tmp_path)) if number > 1 else None
    if mirrored is None:
        # The owner's file is half-written, and the next process writes it again.
        assert number == 1
        return
    assert 10 in mirrored.records
    restored, warnings = restore(tmp_path)
    assert warnings == []
    for step in mirrored.records:
        folder = make_checkpoint_path(restored / FOLDER, step)
        verify_files(folder)
        written = read_tree(make_checkpoint_path(run_dir / FOLDER, step))
        assert read_tree(folder) in ([written, earlier] if step == 20 else [written])


def test_damaged_copy_is_skipped(tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    (tmp_path / f"store/20/{FOLDER}/20/state/d/array").write_text("other")
    restored, warnings = restore(tmp_path)
    url = store_of(tmp_path).url
    assert warnings == [
        f"{url}/20/{FOLDER}/20/state/d/array: doesn't match its record; left out, and step 10 is "
        "the newest"
    ]
    assert [path.name for path in (restored / FOLDER).iterdir()] == ["10"]
    shutil.rmtree(restored)
    (tmp_path / "store/10/metrics.jsonl").unlink()
    with pytest.raises(DataError, match=r"no checkpoint can be read: .*20.*10/metrics.jsonl"):
        restore(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "checkpoints/30/x", "a/b", "ckpt/.."])
def test_record_with_outside_path_is_ignored(name: str, tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    file = tmp_path / "store/records/20.json"
    record = json.loads(file.read_text())
    record["files"][name] = {"bytes": 1, "sha256": "0"}
    file.write_text(json.dumps(record))
    assert sorted(read(tmp_path).records) == [10]


def test_record_without_files_is_skipped(tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    (tmp_path / "store/records/10.json").write_text('{"step": 10, "files": {}}')
    restored, warnings = restore(tmp_path)
    assert [path.name for path in (restored / FOLDER).iterdir()] == ["20"]
    assert "left out, and step 20 is the newest" in warnings[0]


@pytest.mark.parametrize("content", [None, "", "seed: 2\n"])
def test_small_file_is_read_beside_an_older_checkpoint_if_damaged(
    content: str | None, tmp_path: Path, run_dir: Path
) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    for step in (20, 10):
        assert read(tmp_path).read_small("recipe.yaml", 100) == b"seed: 1\n"
        file = tmp_path / f"store/{step}/recipe.yaml"
        file.unlink()
        if content is not None:
            file.write_text(content)
    with pytest.raises(DataError, match=r"recipe.yaml is missing or damaged beside all"):
        read(tmp_path).read_small("recipe.yaml", 100)


def test_checkpoint_that_is_removed_during_its_copy_is_not_a_failure(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def remove_and_link(source: Path, target: Path) -> None:
        if (checkpoint := make_checkpoint_path(run_dir / FOLDER, 20)).exists():
            remove_checkpoint(checkpoint)
        link(source, target)

    monkeypatch.setattr("os.link", remove_and_link)
    warnings: list[str] = []
    with mirror_of(tmp_path, run_dir, warnings):
        pass
    assert warnings == []
    assert sorted(read(tmp_path).records) == [10]


def test_damaged_checkpoint_does_not_replace_its_copy(tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    (make_checkpoint_path(run_dir / FOLDER, 20) / MANIFEST).write_text("{")
    with mirror_of(tmp_path, run_dir) as mirror:
        mirror.add(save(run_dir, 30))
    assert "must be JSON" in str(mirror.failure)
    assert sorted(read(tmp_path).records) == [10, 20, 30]


def test_foreign_folder_is_refused_as_mirror(tmp_path: Path) -> None:
    assert read_mirror(store_of(tmp_path)) is None
    store_of(tmp_path).write("thesis.pdf", b"x")
    with pytest.raises(DataError, match=r"isn't a mirror, and holds thesis\.pdf"):
        read_mirror(store_of(tmp_path))


def test_failed_store_is_reported_once_and_caught_up(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Storage.upload
    failed = threading.Event()
    is_broken = True

    def fail(self: Storage, file: Path, name: str) -> None:
        if is_broken:
            raise RunError("s3://b: can't be written: the network is down")
        upload(self, file, name)

    def warn(line: str) -> None:
        warnings.append(line)
        failed.set()

    warnings: list[str] = []
    monkeypatch.setattr(Storage, "upload", fail)
    mirror = Mirror(MirroredRun(store_of(tmp_path), "me", {}), run_dir, FILES, warn)
    with mirror:
        assert failed.wait(20)
        mirror.add(save(run_dir, 30))
        is_broken = False
    assert mirror.failure is None
    assert sorted(read(tmp_path).records) == [10, 20, 30]
    is_broken = True
    with mirror_of(tmp_path, run_dir, warnings) as mirror:
        mirror.add(save(run_dir, 40))
    problem = "s3://b: can't be written: the network is down"
    assert warnings == [f"checkpoint.mirror: {problem}; training goes on without it"] * 2
    assert mirror.failure == problem
    assert sorted(read(tmp_path).records) == [10, 20, 30]


def test_replaced_process_stops_writing(tmp_path: Path, run_dir: Path) -> None:
    warnings: list[str] = []
    with mirror_of(tmp_path, run_dir, warnings) as first:
        while len(read(tmp_path).records) < 2:
            pass
        with mirror_of(tmp_path, run_dir):
            pass
        first.add(save(run_dir, 30))
    assert "another process writes this mirror now" in warnings[0]
    assert sorted(read(tmp_path).records) == [10, 20]
    owner = json.loads((tmp_path / "store" / OWNER).read_text())
    assert owner["run"] == "me"


@pytest.mark.skipif(importlib.util.find_spec("moto") is None, reason="moto isn't installed")
def test_s3_server_holds_a_mirror(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written, read and restored by s3fs; a missing bucket and missing credentials are refused."""
    server = importlib.import_module("moto.server").ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3ntinel")
        store = open_storage("s3://bucket/run")
        store.system.mkdir("bucket")
        with Mirror(MirroredRun(store, "me", {}), run_dir, FILES, print) as mirror:
            pass
        assert mirror.failure is None
        mirrored = read_mirror(open_storage("s3://bucket/run"))
        assert mirrored is not None
        (tmp_path / "restored").mkdir()
        mirrored.restore(tmp_path / "restored", print)
        assert read_tree(tmp_path / "restored") == read_tree(run_dir)
        with pytest.raises(DataError, match="there is no such file, folder or bucket"):
            open_storage("s3://none/run").write("x", b"x")
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(DataError, match="the credentials are missing or refused"):
            read_mirror(open_storage("s3://bucket/run"))
    finally:
        server.stop()


def test_interruption_ends_the_wait(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    upload = Storage.upload

    def hang(self: Storage, file: Path, name: str) -> None:
        hung.wait(60)
        upload(self, file, name)

    monkeypatch.setattr(Storage, "upload", hang)
    mirror = mirror_of(tmp_path, run_dir)
    with pytest.raises(KeyboardInterrupt), mirror:
        raise KeyboardInterrupt
    hung.set()
    mirror._thread.join(60)
