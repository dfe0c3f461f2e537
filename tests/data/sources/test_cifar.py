from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.copies.checksums import RemoteFile
from pipeline.data.sources.cifar import (
    Cifar10,
    Cifar100,
    CifarDataset,
    Release,
    read_records,
    unpack,
)
from tests.data.section import section

REAL = Path(__file__).parents[4] / "shared" / "data" / "cifar10"
SMALL = Release(
    stem="cifar-10-binary",
    folder="cifar-10-batches-bin",
    train={"data_batch_1.bin": 3, "data_batch_2.bin": 2},
    eval={"test_batch.bin": 2},
    label_bytes=1,
    classes=10,
)
LABELS = {"data_batch_1.bin": [6, 9, 9], "data_batch_2.bin": [4, 1], "test_batch.bin": [3, 8]}


class SmallCifar(CifarDataset):
    name: Literal["small"] = "small"
    release = SMALL
    archive = Cifar10.archive
    class_names = Cifar10.class_names


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)


def record(labels: list[int], image: np.ndarray) -> bytes:
    """One record, pixel by pixel: label bytes, then the red, green and blue plane (D-02)."""
    planes = [
        int(image[row, column, channel])
        for channel in range(3)
        for row in range(32)
        for column in range(32)
    ]
    return bytes([*labels, *planes])


def small_files(seed: int = 0) -> dict[str, bytes]:
    return {
        name: b"".join(record([label], picture(seed + label)) for label in labels)
        for name, labels in LABELS.items()
    }


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def write_archive(
    path: Path, files: Mapping[str, bytes], prefix: str = "cifar-10-batches-bin/"
) -> Path:
    mode = {".gz": "w:gz", ".tgz": "w:gz", ".xz": "w:xz", ".tar": "w"}[path.suffix]
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{prefix}{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def assert_reads_small(root: Path, cache: Path) -> None:
    data = SmallCifar(**section(root=root)).read(cache)

    assert data.train.columns["label"][:].tolist() == [6, 9, 9, 4, 1]
    assert data.eval.columns["label"][:].tolist() == [3, 8]
    assert data.train.columns["label"].dtype == np.int32
    pictures = np.stack([picture(seed) for seed in (6, 9, 9, 4, 1)])
    np.testing.assert_array_equal(data.train.columns["image"][:], pictures)
    assert data.classes[6] == "frog"


def test_last_label_byte_of_a_record_is_used(tmp_path: Path) -> None:
    fine = Release("", "", {"train.bin": 2}, {}, label_bytes=2, classes=100)
    path = tmp_path / "train.bin"
    path.write_bytes(record([11, 19], picture(0)) + record([200, 99], picture(1)))

    images, labels = read_records(path, 2, fine)

    assert labels.tolist() == [19, 99]
    np.testing.assert_array_equal(images, np.stack([picture(0), picture(1)]))
    assert (images.dtype, labels.dtype) == (np.uint8, np.int32)


def test_root_may_be_the_folder_or_its_parent(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data" / SMALL.folder, small_files())

    assert_reads_small(folder, tmp_path / "cache")
    assert_reads_small(folder.parent, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".tar.xz", ".tar"])
def test_root_may_be_an_archive_or_its_folder(tmp_path: Path, suffix: str) -> None:
    archive = write_archive(tmp_path / f"cifar-10-binary{suffix}", small_files())

    assert_reads_small(archive, tmp_path / "cache")
    assert_reads_small(tmp_path, tmp_path / "cache")


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The archive in the cache in `tmp_path`, as if it had been published and downloaded."""
    (tmp_path / "small").mkdir()
    archive = write_archive(tmp_path / "small" / "cifar-10-binary.tar.gz", small_files())
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(SmallCifar, "archive", RemoteFile(archive.name, md5))
    return archive


def labels_in(cache: Path) -> list[int]:
    return SmallCifar(**section()).read(cache).eval.columns["label"][:].tolist()


def test_archive_in_the_cache_is_read_without_a_download(downloaded: Path, tmp_path: Path) -> None:
    assert labels_in(tmp_path) == [3, 8]


def test_replaced_downloaded_archive_is_named(downloaded: Path, tmp_path: Path) -> None:
    write_archive(downloaded, small_files(seed=50))
    with pytest.raises(DataError, match=rf"^{downloaded}: isn't the published file: md5"):
        labels_in(tmp_path)
    result = SmallCifar(**section(root=downloaded)).read(tmp_path)
    assert len(result.train) == 5, "named by the user it is the user's"


@pytest.mark.parametrize("own", [False, True], ids=["downloaded", "of the user"])
def test_unpacked_files_changed_in_place_are_unpacked_again(
    own: bool, downloaded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Size and time may be as they were."""
    recipe = SmallCifar(**section(root=downloaded if own else None))
    (file,) = (recipe.read(tmp_path), *tmp_path.glob("small/*/test_batch.bin"))[1:]
    before, right = file.stat(), file.read_bytes()
    file.write_bytes(right[:3073] + bytes([9]) + right[3074:])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert recipe.read(tmp_path).eval.columns["label"][:].tolist() == [3, 8]
    assert file.read_bytes() == right
    assert f"{file.parent}: was changed; unpacking {downloaded} again" in caplog.text


@pytest.mark.parametrize("left", ["nothing", "a list", "a folder in the place of a file"])
def test_partly_unpacked_archive_is_unpacked_again(
    left: str, downloaded: Path, tmp_path: Path
) -> None:
    labels_in(tmp_path)
    (folder,) = tmp_path.glob("small/cifar-10-batches-bin-*")
    for name in {"nothing": [*LABELS, "SHA256SUMS"], "a list": LABELS}.get(left, []):
        (folder / name).unlink()
    if left.startswith("a folder"):
        (folder / "test_batch.bin").unlink()
        (folder / "test_batch.bin").mkdir()
        with pytest.raises(DataError, match=r"can't be unpacked into .*test_batch.bin"):
            labels_in(tmp_path)
    else:
        assert labels_in(tmp_path) == [3, 8]


def test_unpacked_files_pass_sha256sum(tmp_path: Path) -> None:
    folder = unpack(write_archive(tmp_path / "a.tar", small_files()), SMALL, tmp_path / "cache")
    said = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True)
    assert (said.returncode, said.stdout.count(b": OK\n")) == (0, 3)


def test_archive_is_unpacked_once(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "any-name.tar.gz", small_files())
    unpacked = unpack(archive, SMALL, tmp_path / "cache")
    first = unpacked.stat()

    renamed = archive.rename(tmp_path / "renamed.tar.gz")

    assert unpack(renamed, SMALL, tmp_path / "cache") == unpacked
    assert (unpacked.stat().st_ino, unpacked.stat().st_mtime_ns) == (
        first.st_ino,
        first.st_mtime_ns,
    )


def test_changed_archive_is_unpacked_again(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a.tar", small_files())
    old = unpack(archive, SMALL, tmp_path / "cache")

    write_archive(archive, small_files(seed=50))
    new = unpack(archive, SMALL, tmp_path / "cache")

    assert (old / "test_batch.bin").read_bytes() == small_files()["test_batch.bin"]
    assert (new / "test_batch.bin").read_bytes() == small_files(seed=50)["test_batch.bin"]


@pytest.mark.parametrize("prefix", ["../../outside/", "/", "", "./a/b/"])
def test_paths_in_an_archive_are_not_used(tmp_path: Path, prefix: str) -> None:
    files = {**small_files(), "../stranger.txt": b"boo"}
    archive = write_archive(tmp_path / "a.tar.gz", files, prefix=prefix)

    folder = unpack(archive, SMALL, tmp_path / "cache")

    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    inside = {f"cache/{folder.name}/{name}" for name in (*LABELS, "SHA256SUMS")}
    assert written == {"a.tar.gz", "cache", "cache/.lock", f"cache/{folder.name}", *inside}


def test_links_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name in LABELS:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)

    with pytest.raises(DataError, match=r"it lacks data_batch_1.bin, data_batch_2.bin, test_batch"):
        unpack(path, SMALL, tmp_path / "cache")


def without_checksum(zipped: bytes) -> bytes:
    return zipped[:-8] + b"\0\0\0\0" + zipped[-4:]


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    [
        (".tar", lambda content: b"no archive at all", "truncated header"),
        (".tar", lambda content: content[:9_000], "unexpected end of data"),
        (".tar.gz", lambda content: b"no archive at all", "Not a gzipped file"),
        (".tar.gz", lambda content: content[:-20], "end-of-stream marker"),
        (".tar.gz", without_checksum, "CRC check failed"),
        (".tar.xz", lambda content: content[:-20], "end-of-stream marker"),
        (".tar.xz", lambda content: content[:400] + b"\xff\xff" + content[402:], "[Cc]orrupt"),
    ],
)
def test_damaged_archive_is_named_and_its_draft_removed(
    tmp_path: Path, suffix: str, damage, message: str
) -> None:
    path = write_archive(tmp_path / f"a{suffix}", small_files())
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(DataError, match=rf"a{suffix}: can't be unpacked into .*{message}"):
        unpack(path, SMALL, tmp_path / "cache")
    assert [left.name for left in (tmp_path / "cache").iterdir()] == [".lock"]


def test_member_of_another_size_is_refused(tmp_path: Path) -> None:
    files = {**small_files(), "data_batch_2.bin": b"\0" * 3_073 * 3}
    path = write_archive(tmp_path / "a.tar.gz", files)

    with pytest.raises(DataError, match=r"data_batch_2.bin has 9,219 bytes, not 6,146"):
        unpack(path, SMALL, tmp_path / "cache")


def test_non_archive_file_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, small_files())

    with pytest.raises(DataError, match=r"it must be one of .tar.gz, .tgz, .tar.xz, .tar"):
        SmallCifar(**section(root=folder / "data_batch_1.bin")).read(tmp_path / "cache")


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_missing_file_is_named(tmp_path: Path, inner: str) -> None:
    folder = write_folder(tmp_path / inner, small_files())
    (folder / "data_batch_2.bin").unlink()

    with pytest.raises(DataError, match=f"^{folder} lacks data_batch_2.bin; dataset.root must be"):
        SmallCifar(**section(root=tmp_path)).read(tmp_path / "cache")


def test_missing_root_is_named(tmp_path: Path) -> None:
    root = tmp_path / "nowhere"
    with pytest.raises(DataError, match=f"^dataset.root = {root}: there is no such file or folder"):
        SmallCifar(**section(root=root)).read(tmp_path / "cache")


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a.bin: can't be read: No such file"):
        read_records(tmp_path / "a.bin", 1, SMALL)
    with pytest.raises(DataError, match=r"a.tar: can't be read: No such file"):
        unpack(tmp_path / "a.tar", SMALL, tmp_path)


def test_file_of_another_size_is_named(tmp_path: Path) -> None:
    files = {**small_files(), "data_batch_1.bin": b"\0" * 3_073}
    folder = write_folder(tmp_path, files)

    with pytest.raises(
        DataError, match=r"data_batch_1.bin: has 3,073 bytes instead of 9,219 \(3 r"
    ):
        SmallCifar(**section(root=folder)).read(tmp_path / "cache")


def test_label_out_of_range_is_named(tmp_path: Path) -> None:
    wrong = record([1], picture(0)) + record([10], picture(1))
    folder = write_folder(tmp_path, {**small_files(), "test_batch.bin": wrong})

    with pytest.raises(DataError, match=r"test_batch.bin: label 10 of record 1 must be 0 to 9"):
        SmallCifar(**section(root=folder)).read(tmp_path / "cache")


def test_failed_download_names_the_archive_and_the_twin(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        Cifar100(**section()).read(tmp_path)

    message = str(caught.value)
    assert f"Put cifar-100-binary.tar.gz into {tmp_path / 'cifar100'}" in message
    assert "dataset.like=cifar100" in message


@pytest.mark.parametrize(("source", "classes"), [(Cifar10, 10), (Cifar100, 100)])
def test_releases_are_as_published(source: type[CifarDataset], classes: int) -> None:
    facts = source(**section()).facts()

    assert (facts.image, facts.classes) == ((32, 32, 3), classes)
    assert (facts.train_size, facts.eval_size) == (50_000, 10_000)
    assert len(source.class_names) == classes
    assert list(source.class_names) == sorted(set(source.class_names))
    record_bytes = {10: 3_073, 100: 3_074}[classes]
    assert sum(source.release.file_bytes.values()) == 60_000 * record_bytes


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the CIFAR-10 archive is not here")
def test_real_cifar10_is_read(cache: Path) -> None:
    data = Cifar10(**section(root=REAL)).read(cache)

    assert data.train.columns["image"].shape == (50_000, 32, 32, 3)
    assert data.eval.columns["image"].shape == (10_000, 32, 32, 3)
    assert np.bincount(data.train.columns["label"][:]).tolist() == [5_000] * 10
    assert np.bincount(data.eval.columns["label"][:]).tolist() == [1_000] * 10
    # frog truck truck deer automobile; cat ship ship airplane frog
    assert data.train.columns["label"][:5].tolist() == [6, 9, 9, 4, 1]
    assert data.eval.columns["label"][:5].tolist() == [3, 8, 8, 0, 6]
    # D-06: the means of red, green and blue in the training images; 81 of them are inexact.
    means = data.train.columns["image"][:].mean(axis=(0, 1, 2)) / 255
    np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=1e-4)
