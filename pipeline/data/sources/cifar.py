"""CIFAR-10 and CIFAR-100 in their binary form: records of label bytes and 3x32x32 pixels."""

from __future__ import annotations

import gzip
import io
import logging
import lzma
import shutil
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar, Literal

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.atomic_write import commit
from pipeline.core.files.ownership import make_private
from pipeline.core.registry import part
from pipeline.data.checksums import SUMS, RemoteFile, checksum, is_as_written, list_sums
from pipeline.data.columns import Facts, RawData, Split, blank_data
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.download import exclusive, fetch_all, require_published
from pipeline.data.targets import Targets

_SIDE = 32
_CHANNELS = 3
_IMAGE_BYTES = _CHANNELS * _SIDE * _SIDE
_OPENERS: Mapping[str, Callable[..., Any]] = {
    ".tar.gz": gzip.open,
    ".tgz": gzip.open,
    ".tar.xz": lzma.open,
    ".tar": open,
}
_CHUNK_BYTES = 1 << 20
_OTHER_BYTES = 16 << 20
"""Bytes of an archive besides the files to read: a readme, the names of classes, headers."""
_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Release:
    """Layout of one CIFAR: file name -> records for each split, and the format of a record."""

    stem: str
    """The archive's name without suffix."""
    folder: str
    """The folder in the archive."""
    train: Mapping[str, int]
    eval: Mapping[str, int]
    label_bytes: int
    """Bytes of labels in a record; the last is the label."""
    classes: int

    @property
    def file_bytes(self) -> dict[str, int]:
        """The required size of each file."""
        record_bytes = self.label_bytes + _IMAGE_BYTES
        return {name: n * record_bytes for name, n in {**self.train, **self.eval}.items()}


class CifarDataset(DatasetSpec):
    """Colour images of 32x32, as a folder of .bin files or the archive that they come in."""

    release: ClassVar[Release]
    archive: ClassVar[RemoteFile]
    class_names: ClassVar[tuple[str, ...]]

    def facts(self) -> Facts:
        """Sizes that the files must have."""
        return Facts(
            image=(_SIDE, _SIDE, _CHANNELS),
            classes=self.release.classes,
            train_size=sum(self.release.train.values()),
            eval_size=sum(self.release.eval.values()),
        )

    def declare(self, cache: Path) -> RawData | None:
        """Blank data, if the release is neither in the cache nor in a folder of the user's."""
        there = self.root is not None or find_release(cache / self.name, self.release) is not None
        return None if there else blank_data(self.facts(), self.class_names)

    def read(self, cache: Path) -> RawData:
        """Images uint8 (n, 32, 32, 3), labels int32 (n,)."""
        downloads = cache / self.name
        path = find_release(self.root or downloads, self.release)
        if path is None and self.root is None:
            fetch_all(self.name, [self.archive], self.mirrors, downloads)
            path = downloads / self.archive.name
        if path is None:
            raise DataError(_missing_text(self.root or downloads, self.release))
        folder = self._unpacked(path, downloads) if path.is_file() else path
        return RawData(
            train=read_split(folder, self.release.train, self.release),
            eval=read_split(folder, self.release.eval, self.release),
            targets=Targets(self.class_names),
        )

    def _unpacked(self, archive: Path, downloads: Path) -> Path:
        """The folder of an archive's files: the user's, or the one that was downloaded."""
        downloaded = self.root is None and archive.name == self.archive.name
        return unpack(archive, self.release, downloads, self.archive if downloaded else None)


@part("dataset")
class Cifar10(CifarDataset):
    """Ten kinds of animals and vehicles, of A. Krizhevsky, V. Nair and G. Hinton."""

    name: Literal["cifar10"] = "cifar10"
    release = Release(
        stem="cifar-10-binary",
        folder="cifar-10-batches-bin",
        train={f"data_batch_{i}.bin": 10_000 for i in range(1, 6)},
        eval={"test_batch.bin": 10_000},
        label_bytes=1,
        classes=10,
    )
    archive = RemoteFile("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530")
    class_names = tuple(_CIFAR10_CLASSES.split())


@part("dataset")
class Cifar100(CifarDataset):
    """A hundred classes; each record also has one of 20 coarse classes, which is not read."""

    name: Literal["cifar100"] = "cifar100"
    release = Release(
        stem="cifar-100-binary",
        folder="cifar-100-binary",
        train={"train.bin": 50_000},
        eval={"test.bin": 10_000},
        label_bytes=2,
        classes=100,
    )
    archive = RemoteFile("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8")
    class_names = tuple(_CIFAR100_CLASSES.split())


def find_release(root: Path, release: Release) -> Path | None:
    """Find the folder with the .bin files or an archive of them at `root`; None without either."""
    if root.is_file():
        return root
    for folder in (root, root / release.folder):
        if all((folder / name).is_file() for name in release.file_bytes):
            return folder
    archives = (root / f"{release.stem}{suffix}" for suffix in _OPENERS)
    return next((archive for archive in archives if archive.is_file()), None)


def unpack(
    archive: Path, release: Release, cache: Path, published: RemoteFile | None = None
) -> Path:
    """The folder below `cache` with the archive's .bin files, unpacked where it is missing.

    The folder is named after the archive's content, so a changed archive is unpacked again. One
    that was `published` is identified by that checksum, and read only to unpack it. Files that
    were changed since are unpacked again too. Raises DataError that names the archive.
    """
    digest = published.md5 if published is not None else _sha256(archive, release)
    folder = cache / f"{release.folder}-{digest[:16]}"
    with exclusive(cache):
        if not is_as_written(folder, release.file_bytes):
            if published is not None:
                require_published(archive, published)
            if (folder / SUMS).exists():
                log.warning("%s: was changed since; unpacking %s again", folder, archive)
            _unpack(archive, release.file_bytes, folder)
    return folder


def _sha256(archive: Path, release: Release) -> str:
    at_most_bytes = sum(release.file_bytes.values()) + _OTHER_BYTES
    try:
        size_bytes = archive.stat().st_size
        if size_bytes > at_most_bytes:
            raise DataError(
                f"{archive}: has {size_bytes:,} bytes; it can't be {release.stem}, which has "
                f"{at_most_bytes:,} at most"
            )
        return checksum(archive)
    except OSError as error:
        raise DataError(f"{archive}: can't be read: {error.strerror}") from error


def _unpack(archive: Path, file_bytes: Mapping[str, int], folder: Path) -> None:
    scratch = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        make_private(scratch)
        _copy_members(archive, file_bytes, scratch)
        (scratch / SUMS).write_text(list_sums(scratch, file_bytes))
        make_private(folder)
        # One by one: another process may be reading what is there. The list comes last.
        for name in (*file_bytes, SUMS):
            commit(scratch / name, folder / name)
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error, ValueError) as error:
        raise DataError(f"{archive}: can't be unpacked into {folder}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _copy_members(archive: Path, file_bytes: Mapping[str, int], folder: Path) -> None:
    """Copy the files to read into `folder`; the paths in the archive are not used."""
    missing = set(file_bytes)
    at_most_bytes = sum(file_bytes.values()) + _OTHER_BYTES
    with _opener(archive)(archive, "rb") as unbounded:
        stream = _Bounded(unbounded, at_most_bytes)
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None and name in missing:
                    missing.remove(name)
                    _copy(content, member.size, folder / name, file_bytes[name])
        # The checksum of the content is at the very end.
        while stream.read(_CHUNK_BYTES):
            pass
    if missing:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")


class _Bounded(io.RawIOBase):
    """A stream that raises an error beyond a number of bytes."""

    def __init__(self, stream: IO[bytes], at_most_bytes: int) -> None:
        self._stream, self._left_bytes, self._at_most_bytes = stream, at_most_bytes, at_most_bytes

    def read(self, size: int = -1) -> bytes:
        """The next bytes, `size` at most. Raises ValueError beyond the bound."""
        most = self._left_bytes + 1
        content = self._stream.read(most if size < 0 else min(size, most))
        self._left_bytes -= len(content)
        if self._left_bytes < 0:
            raise ValueError(f"it unpacks to more than {self._at_most_bytes:,} bytes")
        return content


def _copy(content: IO[bytes], size_bytes: int, path: Path, right_bytes: int) -> None:
    if size_bytes != right_bytes:
        raise ValueError(f"{path.name} has {size_bytes:,} bytes instead of {right_bytes:,}")
    with path.open("wb") as target:
        shutil.copyfileobj(content, target, _CHUNK_BYTES)


def _opener(archive: Path) -> Callable[..., Any]:
    for suffix, opener in _OPENERS.items():
        if archive.name.endswith(suffix):
            return opener
    raise ValueError(f"it must be one of {', '.join(_OPENERS)}")


def read_split(folder: Path, files: Mapping[str, int], release: Release) -> Split:
    """Read the records of the files, one after the other. Raises DataError that names the file."""
    parts = [read_records(folder / name, count, release) for name, count in files.items()]
    images = np.concatenate([images for images, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    return Split({"image": images, "label": labels})


def read_records(path: Path, count: int, release: Release) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (count, 32, 32, 3) and labels int32 (count,) of one .bin file.

    A record is the label bytes, then the red, green and blue plane, each row by row.
    """
    record_bytes = release.label_bytes + _IMAGE_BYTES
    right_bytes = count * record_bytes
    try:
        size_bytes = path.stat().st_size
        content = np.fromfile(path, np.uint8, right_bytes)
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from error
    if size_bytes != right_bytes:
        raise DataError(
            f"{path}: has {size_bytes:,} bytes instead of {right_bytes:,} "
            f"({count:,} records of {record_bytes:,} bytes)"
        )
    records = content.reshape(count, record_bytes)
    labels = records[:, release.label_bytes - 1].astype(np.int32)
    if labels.max() >= release.classes:
        record, last = int(labels.argmax()), release.classes - 1
        raise DataError(f"{path}: label {labels[record]} of record {record:,} must be 0 to {last}")
    planes = records[:, release.label_bytes :].reshape(count, _CHANNELS, _SIDE, _SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


def _missing_text(root: Path, release: Release) -> str:
    inner = root / release.folder
    folder = inner if inner.is_dir() else root
    missing = [name for name in release.file_bytes if not (folder / name).is_file()]
    return (
        f"{folder} lacks {', '.join(missing)}; dataset.root must be the folder that holds them, "
        f"the folder above {release.folder}, the archive {release.stem}.tar.gz or .tar.xz, its "
        "folder, or null to download it"
    )
