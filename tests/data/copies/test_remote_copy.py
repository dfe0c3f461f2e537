"""Copies of remote files, from a folder that stands for a store."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.registry import _registry

from pipeline import load_recipe
from pipeline.checkpoint.restore import read_saved
from pipeline.core.errors import DataError, RunError
from pipeline.core.files.paths import Address
from pipeline.core.files.storage import Storage
from pipeline.data.copies.checksums import SUMS
from pipeline.data.copies.remote_copy import LISTING, copy_once, find_copy_folder
from pipeline.models.weights.files.weight_files import write_weights
from pipeline.stages.fine_tuning import choose_weight_file
from tests.scheduler.faulty_storage import FOLDER, FaultyFileSystem, register_faulty_storage
from tests.whole_run import run

ADDRESS = Address("s3://bucket/data")


@pytest.fixture(autouse=True)
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a bucket with three files."""
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.setattr("pipeline.core.files.storage.WAITS_S", ())
    monkeypatch.setattr(FaultyFileSystem, "share", 0.0)
    before = dict(_registry)
    register_faulty_storage(tmp_path, 0.0)
    folder = tmp_path / "bucket" / "data"
    (folder / "train").mkdir(parents=True)
    for name in ("train/a", "train/b", "c"):
        (folder / name).write_bytes(name.encode())
    yield folder
    _registry.clear()
    _registry.update(before)


def read_tree(folder: Path) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def test_folder_is_copied_once_and_reused_offline(
    bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copy_once(ADDRESS, tmp_path / "cache")
    assert read_tree(copy) == {"train/a": b"train/a", "train/b": b"train/b", "c": b"c"}
    assert capsys.readouterr().out == f"s3://bucket/data: 3 files, 15 B, copied to {copy.parent}\n"
    sums = (copy.parent / SUMS).read_text()
    assert f"{hashlib.sha256(b'c').hexdigest()}  tree/c\n" in sums
    shutil.rmtree(bucket)
    assert copy_once(ADDRESS, tmp_path / "cache") == copy
    assert capsys.readouterr().out == ""


def test_copied_file_keeps_its_name_and_is_verified(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"c").hexdigest()
    copy = copy_once(Address(f"s3://bucket/data/c#sha256={digest}"), tmp_path / "cache")
    assert (copy.name, copy.read_bytes()) == ("c", b"c")
    other = Address(f"s3://bucket/data/c#sha256={'0' * 64}")
    with pytest.raises(DataError, match=f"has SHA-256 {digest}; the file has changed"):
        copy_once(other, tmp_path / "cache")
    assert not (find_copy_folder(other, tmp_path / "cache") / SUMS).exists()
    with pytest.raises(DataError, match="must have no #, or be a file"):
        copy_once(Address("s3://bucket/data/c#md5=0"), tmp_path / "cache")


@pytest.mark.medium
def test_series_of_files_is_copied_as_a_folder(bucket: Path, tmp_path: Path) -> None:
    for number in range(12):
        (bucket / f"x-{number:02}.tar").write_bytes(bytes([number]))
    copy = copy_once(Address("s3://bucket/data/{x-{08..11}.tar,c}"), tmp_path / "cache")
    assert read_tree(copy) == {"c": b"c", **{f"x-{n:02}.tar": bytes([n]) for n in range(8, 12)}}
    for address, problem in {
        "s3://bucket/data/x-{11..12}.tar": "x-12.tar: can't be read: there is no such file",
        "s3://bucket/data/x-{0..9}.tar?token=t": "must have no query, since braces",
        "s3://bucket/data/{0..999999}": "must stand for at most 100,000 names",
        "s3://bucket/data/{c,c}#sha256=00": "must have no #, or be a file",
    }.items():
        with pytest.raises(DataError, match=problem):
            copy_once(Address(address), tmp_path / "cache")


def test_changed_copy_is_refused(tmp_path: Path) -> None:
    copy = copy_once(ADDRESS, tmp_path / "cache")
    (copy / "c").write_bytes(b"d")
    with pytest.raises(DataError, match=r"has changed; remove .* to copy it again"):
        copy_once(ADDRESS, tmp_path / "cache")
    (copy / "c").unlink()
    with pytest.raises(DataError, match=r"can't be read: .*; remove .* to copy it again"):
        copy_once(ADDRESS, tmp_path / "cache")


def test_interrupted_copy_continues_with_equal_files(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    download = Storage.download

    def stop_at_second(self: Storage, name: str, file: Path) -> None:
        if len(fetched) == 1:
            fetched.append("stop")
            raise KeyboardInterrupt
        fetched.append(name)
        download(self, name, file)

    monkeypatch.setattr(Storage, "download", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        copy_once(ADDRESS, tmp_path / "cache")
    folder = find_copy_folder(ADDRESS, tmp_path / "cache")
    assert (folder / LISTING).exists()
    first = fetched[0]
    for name in {"train/a", "train/b", "c"} - {first}:
        (bucket / name).write_bytes(b"new " + name.encode())
    copy = copy_once(ADDRESS, tmp_path / "cache")
    assert sorted(fetched[2:]) == sorted({"train/a", "train/b", "c"} - {first})
    assert read_tree(copy) == read_tree(bucket)


def test_file_changed_during_the_copy_is_an_error(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download = Storage.download

    def change(self: Storage, name: str, file: Path) -> None:
        download(self, name, file)
        (bucket / "c").write_bytes(b"e")

    monkeypatch.setattr(Storage, "download", change)
    with pytest.raises(DataError, match="has changed while it was copied; run this again"):
        copy_once(ADDRESS, tmp_path / "cache")
    monkeypatch.setattr(Storage, "download", download)
    assert (copy_once(ADDRESS, tmp_path / "cache") / "c").read_bytes() == b"e"


def test_incomplete_download_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = Storage.download

    def halve(self: Storage, name: str, file: Path) -> None:
        download(self, name, file)
        file.write_bytes(file.read_bytes()[:-1])

    monkeypatch.setattr(Storage, "download", halve)
    with pytest.raises(RunError, match=r"\d bytes arrived instead of \d"):
        copy_once(ADDRESS, tmp_path / "cache")


@pytest.mark.parametrize("name", ["../x", "a//b", "a/../../x", "a\nb"])
def test_unsafe_file_names_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: Any = {name: {"size": 1, "name": name}}
    monkeypatch.setattr(FaultyFileSystem, "find", lambda *_, **__: listed)
    monkeypatch.setattr(FaultyFileSystem, "isfile", lambda *_: False)
    with pytest.raises(DataError, match="which can't be copied"):
        copy_once(ADDRESS, tmp_path / "cache")


def test_empty_address_error_has_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file or folder, or it is empty"):
        copy_once(Address("s3://bucket/none"), tmp_path / "cache")


def test_file_is_selected_by_name(tmp_path: Path) -> None:
    def choose(names: Sequence[str]) -> str:
        return max(names)

    copy = copy_once(ADDRESS, tmp_path / "cache", choose)
    assert (copy.name, copy.read_bytes()) == ("b", b"train/b")


def test_too_small_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=3)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(RunError, match=r"has 15 B to copy, and .* has room for 3 B"):
        copy_once(ADDRESS, tmp_path / "cache")


def test_continued_copy_needs_room_for_the_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"count": 0}
    download = Storage.download

    def stop_at_third(self: Storage, name: str, file: Path) -> None:
        files["count"] += 1
        if files["count"] == 3:
            raise KeyboardInterrupt
        download(self, name, file)

    monkeypatch.setattr(Storage, "download", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        copy_once(ADDRESS, tmp_path / "cache")
    usage = shutil.disk_usage(tmp_path)._replace(free=7)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert len(read_tree(copy_once(ADDRESS, tmp_path / "cache"))) == 3


def test_names_with_other_ends_of_lines_are_verified(bucket: Path, tmp_path: Path) -> None:
    for name in ("Icon\r", "a\u2028b"):
        (bucket / name).write_text(name)
    for _ in range(2):
        assert len(read_tree(copy_once(ADDRESS, tmp_path / "cache"))) == 5


def test_faulty_storage_is_registered_with_fsspec() -> None:
    assert isinstance(fsspec.filesystem("s3"), FaultyFileSystem)


@pytest.mark.slow
def test_run_reads_data_and_weights_from_addresses(bucket: Path, tmp_path: Path) -> None:
    """The data of a folder, and the weight file of a repository; the recipe keeps the addresses."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), np.uint8)
    labels = np.arange(40, dtype=np.int32) % 10
    np.savez(
        bucket / "x.npz", x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20]
    )
    cache = f"cache.root={tmp_path / 'cache'}"
    data = ["dataset=numpy", "dataset.root=s3://bucket/data/x.npz", "train.batch_size=8"]
    keys = ["model=mlp", "model.hidden=[4]", "train.epochs=null", "train.steps=4", cache]
    quiet = ["monitor.tensorboard=false", "monitor.sample_images=0"]
    first = run(load_recipe("lenet5_digits", [*data, *keys, *quiet]), tmp_path / "first")
    weights = tmp_path / "bucket/repository"
    weights.mkdir()
    write_weights(weights / "model.safetensors", read_saved(tmp_path / "first").select_weights())
    (weights / "README.md").write_text("x")
    restore = "checkpoint.restore=s3://bucket/repository"
    shutil.rmtree(bucket)
    recipe = load_recipe(
        "lenet5_digits", [*data, *keys, *quiet, restore, "train.optimizer.lr=1e-30"]
    )
    second = run(recipe, tmp_path / "second")
    assert second.metrics["loss"] == first.metrics["loss"]
    text = (tmp_path / "second/recipe.yaml").read_text()
    assert "root: s3://bucket/data/x.npz" in text
    assert "restore: s3://bucket/repository" in text
    (weights / "other.npz").write_bytes(b"")
    (weights / "model.safetensors").rename(weights / "third.safetensors")
    with pytest.raises(ValueError, match="has 2 weight files; name one, as in ADDRESS/model"):
        choose_weight_file(sorted(file.name for file in weights.iterdir()))
    with pytest.raises(ValueError, match="has no weight file"):
        choose_weight_file(["README.md"])
