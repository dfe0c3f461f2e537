"""Mirrors of checkpoints in a local folder, on a store that fails, and after an interruption."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    MANIFEST,
    MIRROR_DRAFT,
    make_checkpoint_path,
    remove_checkpoint,
)
from pipeline.checkpoint.checkpointer import add_metrics
from pipeline.checkpoint.manifest import verify_files, write_manifest
from pipeline.checkpoint.mirror import (
    MirroredRun,
    list_writers,
    read_mirror,
)
from pipeline.checkpoint.mirror_writer import Mirror, MirrorWriter
from pipeline.core.errors import DataError, RecipeError, RunError
from pipeline.core.files import storage
from pipeline.core.files.storage import Storage, open_storage

FILES = ("metrics.jsonl", "recipe.yaml", "none.json")
RUN = "0123456789abcdef"


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
    assert not (folder / MIRROR_DRAFT).exists()


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
    warn = [].append if warnings is None else warnings.append
    return Mirror(MirrorWriter(store_of(tmp_path), RUN, run_dir, FILES), warn)


def read(tmp_path: Path) -> MirroredRun:
    (mirrored,) = read_mirror(store_of(tmp_path), FILES)
    return mirrored


def list_steps(tmp_path: Path) -> list[int]:
    return sorted({copy.step for copy in read(tmp_path).copies})


def find_folder(tmp_path: Path) -> Path:
    """Return the folder of the process that opened the mirror last."""
    return tmp_path / "store" / list_writers(store_of(tmp_path))[-1].folder


def find_copy(tmp_path: Path, step: int) -> Path:
    """Return the folder of the newest copy of a step."""
    copies = [copy for copy in read(tmp_path).copies if copy.step == step]
    return tmp_path / "store" / copies[0].folder


def find_record(tmp_path: Path, step: int) -> Path:
    (record,) = find_folder(tmp_path).glob(f"records/{step}-*.json")
    return record


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
    assert list_steps(tmp_path) == [10, 20]
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
    assert list_steps(tmp_path) == [20, 30]
    names = [path.name.partition("-")[0] for path in find_folder(tmp_path).iterdir()]
    assert sorted(names) == ["20", "30", "opened.json", "records"]
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
    assert list_steps(tmp_path) == [10, 20]


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
    assert 10 in list_steps(tmp_path)
    restored, warnings = restore(tmp_path)
    assert warnings == []
    for step in list_steps(tmp_path):
        folder = make_checkpoint_path(restored / FOLDER, step)
        verify_files(folder)
        written = read_tree(make_checkpoint_path(run_dir / FOLDER, step))
        assert read_tree(folder) in ([written, earlier] if step == 20 else [written])


def test_damaged_copy_is_skipped(tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    file = find_copy(tmp_path, 20) / FOLDER / "20/state/d/array"
    file.write_bytes(file.read_bytes()[::-1])
    restored, warnings = restore(tmp_path)
    path = file.relative_to(tmp_path / "store")
    assert warnings == [
        f"{store_of(tmp_path).url}/{path}: doesn't match its record; left out, and step 10 is the "
        "newest"
    ]
    assert [path.name for path in (restored / FOLDER).iterdir()] == ["10"]
    shutil.rmtree(restored)
    log = find_copy(tmp_path, 10) / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"no checkpoint can be read: .*20.*/metrics.jsonl"):
        restore(tmp_path)


def test_copy_that_lacks_a_file_is_skipped(tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    array = f"{FOLDER}/20/state/d/array"
    (find_copy(tmp_path, 20) / array).write_text("x")
    warnings: list[str] = []
    (mirrored,) = read_mirror(store_of(tmp_path), FILES, warnings.append)
    assert mirrored.newest == 10
    assert len(warnings) == 1
    assert warnings[0].endswith(f"lists {array} with 19 bytes, not 1; skipped")
    (find_copy(tmp_path, 10) / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match=r"no checkpoint can be read: .*jsonl, which is missing"):
        restore(tmp_path)


HOSTILE_NAMES = (
    "../x",
    "/etc/passwd",
    "checkpoints/30/x",
    "a/b",
    "ckpt/..",
    MIRROR_DRAFT,
    FOLDER,
    f"{FOLDER}/20",
    f"{FOLDER}/20/manifest.json/below",
    "metrics.jsonl/below",
    "summary.json",
    ".lock",
    "",
    ".",
    f"{FOLDER}/20/../30/x",
    f"{FOLDER}//20/x",
    f"{FOLDER}/20/a\0b",
    f"{FOLDER}/20/a\ud800",
    f"{FOLDER}/20/a\nb",
    f"{FOLDER}/20/{'x' * 256}",
    f"{FOLDER}/20/{'x/' * 400}x",
)


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=range(len(HOSTILE_NAMES)))
def test_record_with_another_path_is_skipped(name: str, tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    file = find_record(tmp_path, 20)
    record = json.loads(file.read_text())
    record["files"][name] = {"bytes": 1, "sha256": "0"}
    file.write_text(json.dumps(record))
    warnings: list[str] = []
    (mirrored,) = read_mirror(store_of(tmp_path), FILES, warnings.append)
    assert [copy.step for copy in mirrored.copies] == [10]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{store_of(tmp_path).url}/{file.parent.parent.name}/records/20-")
    assert warnings[0].endswith("; skipped")
    restored, _ = restore(tmp_path)
    verify_files(make_checkpoint_path(restored / FOLDER, 10))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"step": 10, "files": {}}',
        b'{"step": 10, "folder": "10-1", "files": {}}',
        b'{"step": 10, "folder": "../10-1", "files": {}}',
        b'{"step": 11, "folder": "10-1", "files": {}}',
        b"[" * 100_000,
        b'{"step": ' + b"1" * 5000 + b"}",
        b"\xff\xfe",
    ],
    ids=range(11),
)
def test_malformed_record_is_skipped(content: bytes, tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    find_record(tmp_path, 10).write_bytes(content)
    warnings: list[str] = []
    (mirrored,) = read_mirror(store_of(tmp_path), FILES, warnings.append)
    assert [copy.step for copy in mirrored.copies] == [20]
    assert len(warnings) == 1
    restored, _ = restore(tmp_path)
    assert [path.name for path in (restored / FOLDER).iterdir()] == ["20"]


@pytest.mark.parametrize("place", ["records/30-9.json", "10-3/metrics.jsonl", "x", "../x"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "link to a pipe"])
def test_pipes_are_never_read(
    kind: str, place: str, tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    path = find_folder(tmp_path) / place
    path.unlink(missing_ok=True)
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            monkeypatch.chdir(path.parent)  # paths of sockets have 108 bytes
            listener.bind(path.name)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    restored, _ = restore(tmp_path)
    assert "20" in os.listdir(restored / FOLDER)
    shutil.rmtree(restored)


@pytest.mark.parametrize("content", [None, "", "seed: 2\n"])
def test_small_file_is_read_beside_an_older_checkpoint_if_damaged(
    content: str | None, tmp_path: Path, run_dir: Path
) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    copies = {step: find_copy(tmp_path, step) for step in (10, 20)}
    for step in (20, 10):
        assert read(tmp_path).read_small("recipe.yaml", 100) == b"seed: 1\n"
        file = copies[step] / "recipe.yaml"
        file.unlink()
        if content is not None:
            file.write_text(content)
    expected = "is missing or damaged beside all" if content == "seed: 2\n" else "no checkpoint can"
    with pytest.raises(DataError, match=expected):
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
    assert list_steps(tmp_path) == [10]


def test_damaged_checkpoint_does_not_replace_its_copy(tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    (make_checkpoint_path(run_dir / FOLDER, 20) / MANIFEST).write_text("{")
    with mirror_of(tmp_path, run_dir) as mirror:
        mirror.add(save(run_dir, 30))
    assert "must be JSON" in str(mirror.failure)
    assert list_steps(tmp_path) == [10, 20, 30]


def test_foreign_folder_is_refused_as_mirror(tmp_path: Path) -> None:
    assert read_mirror(store_of(tmp_path), FILES) == ()
    store_of(tmp_path).write("thesis.pdf", b"x")
    with pytest.raises(DataError, match=r"isn't a mirror, and holds thesis\.pdf"):
        read_mirror(store_of(tmp_path), FILES)


def test_mirror_of_the_old_layout_is_refused(tmp_path: Path, run_dir: Path) -> None:
    """Neither read nor changed."""
    store = store_of(tmp_path)
    for name in ("owner.json", "20/metrics.jsonl", "records/20.json"):
        store.write(name, b"{}")
    before = read_tree(tmp_path / "store")
    with pytest.raises(DataError, match=r"is a mirror of an older version, and holds owner\.json"):
        mirror_of(tmp_path, run_dir).__enter__()
    assert read_tree(tmp_path / "store") == before


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
    mirror = Mirror(MirrorWriter(store_of(tmp_path), RUN, run_dir, FILES), warn)
    with mirror:
        assert failed.wait(20)
        mirror.add(save(run_dir, 30))
        is_broken = False
    assert mirror.failure is None
    assert list_steps(tmp_path) == [10, 20, 30]
    is_broken = True
    with mirror_of(tmp_path, run_dir, warnings) as mirror:
        mirror.add(save(run_dir, 40))
    problem = "s3://b: can't be written: the network is down"
    assert warnings == [f"checkpoint.mirror: {problem}; training goes on without it"] * 2
    assert mirror.failure == problem
    assert list_steps(tmp_path) == [10, 20, 30]


def test_unknown_error_of_a_store_is_a_failure(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library of a store may raise anything, which must not end the copies silently."""

    def fail(self: Storage, file: Path, name: str) -> None:
        raise KeyError

    warnings: list[str] = []
    monkeypatch.setattr(Storage, "upload", fail)
    with mirror_of(tmp_path, run_dir, warnings) as mirror:
        pass
    assert mirror.failure == "KeyError"
    assert warnings == ["checkpoint.mirror: KeyError; training goes on without it"]


def test_replaced_process_stops_writing(tmp_path: Path, run_dir: Path) -> None:
    warnings: list[str] = []
    with mirror_of(tmp_path, run_dir, warnings) as first:
        while len(list(tmp_path.glob("store/*/records/*.json"))) < 2:
            pass
        with mirror_of(tmp_path, run_dir):
            pass
        first.add(save(run_dir, 30))
    assert "another process writes this mirror now" in warnings[0]
    assert list_steps(tmp_path) == [10, 20]
    assert [writer.generation for writer in list_writers(store_of(tmp_path))] == [2]


def test_folder_that_was_removed_is_reported(tmp_path: Path, run_dir: Path) -> None:
    warnings: list[str] = []
    with mirror_of(tmp_path, run_dir, warnings) as mirror:
        while len(list(tmp_path.glob("store/*/records/*.json"))) < 2:
            pass
        shutil.rmtree(find_folder(tmp_path))
        mirror.add(save(run_dir, 30))
    assert "the folder of this process was removed" in warnings[0]
    assert mirror.failure is not None


def test_mirror_of_another_run_is_refused(tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir):
        pass
    before = read_tree(tmp_path / "store")
    other = MirrorWriter(store_of(tmp_path), RUN[::-1], run_dir, FILES)
    with pytest.raises(RecipeError, match="holds another run; name another address"):
        other.open()
    assert read_tree(tmp_path / "store") == before


def test_older_process_of_a_run_is_refused(tmp_path: Path, run_dir: Path) -> None:
    """It has read the mirror before another process copied a newer step."""
    late = mirror_of(tmp_path, shutil.copytree(run_dir, tmp_path / "late"))
    save(run_dir, 30)
    with mirror_of(tmp_path, run_dir):
        pass
    before = read_tree(tmp_path / "store")
    with pytest.raises(RunError, match=r"holds step 30 of .*late, which has step 20: another proc"):
        late.__enter__()
    assert read_tree(tmp_path / "store") == before


def test_only_copy_stays_if_the_run_directory_lacks_it(tmp_path: Path, run_dir: Path) -> None:
    with mirror_of(tmp_path, run_dir) as mirror:
        while len(list(tmp_path.glob("store/*/records/*.json"))) < 2:
            pass
        for step in (10, 20):
            remove_checkpoint(make_checkpoint_path(run_dir / FOLDER, step))
        mirror.remove(20)
    assert list_steps(tmp_path) == [20]


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
        for _ in range(2):
            with Mirror(MirrorWriter(store, RUN, run_dir, FILES), print) as mirror:
                pass
            assert mirror.failure is None
        assert [writer.generation for writer in list_writers(store)] == [2]
        (mirrored,) = read_mirror(open_storage("s3://bucket/run"), FILES)
        (tmp_path / "restored").mkdir()
        mirrored.restore(tmp_path / "restored", print)
        assert read_tree(tmp_path / "restored") == read_tree(run_dir)
        with pytest.raises(DataError, match="there is no such file, folder or bucket"):
            open_storage("s3://none/run").write("x", b"x")
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(DataError, match="the credentials are missing or refused"):
            read_mirror(open_storage("s3://bucket/run"), FILES)
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
