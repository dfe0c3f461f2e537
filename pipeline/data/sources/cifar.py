"""CIFAR-10 and CIFAR-100 in their binary format: records of label bytes and 3x32x32 bytes."""

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
from pipeline.core.files.trusted_files import make_private
from pipeline.core.registry import component
from pipeline.data.columns import RawData, Split, Targets
from pipeline.data.copies.checksums import (
    SUMS,
    RemoteFile,
    compute_checksum,
    format_checksums,
    has_recorded_sums,
)
from pipeline.data.copies.download import fetch_all, lock_data_folder, require_published
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import name_file
from pipeline.data.image_facts import ImageFacts, make_blank_data

_SIDE = 32
_CHANNELS = 3
_IMAGE_BYTES = _CHANNELS * _SIDE * _SIDE
_OPENERS: Mapping[str, Callable[..., Any]] = {
    ".tar.gz": gzip.open,
    ".tgz": gzip.open,
    ".tar.xz": lzma.open,
    ".tar": open,
}
"""The function that opens an archive, by the archive's suffix."""
_CHUNK_BYTES = 1 << 20
_OTHER_BYTES = 16 << 20
"""The most bytes of an archive besides the .bin files: a readme, the names of classes, headers."""
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
    """The files of a CIFAR release. `train` and `eval` map names of files to numbers of records."""

    stem: str
    """Name of the archive, without suffix."""
    folder: str
    """Folder in the archive."""
    train: Mapping[str, int]
    eval: Mapping[str, int]
    label_bytes: int
    """Bytes of labels in a record. The label is the last of them."""
    classes: int

    @property
    def file_bytes(self) -> dict[str, int]:
        """The required size of each file."""
        record_bytes = self.label_bytes + _IMAGE_BYTES
        return {name: count * record_bytes for name, count in {**self.train, **self.eval}.items()}

    @property
    def max_archive_bytes(self) -> int:
        """The most bytes that an archive may have, compressed or not."""
        return sum(self.file_bytes.values()) + _OTHER_BYTES


class CifarDataset(DatasetSpec):
    """Colour images of 32x32, from a folder of .bin files or their archive."""

    release: ClassVar[Release]
    archive: ClassVar[RemoteFile]
    class_names: ClassVar[tuple[str, ...]]

    def facts(self) -> ImageFacts:
        return ImageFacts(
            image=(_SIDE, _SIDE, _CHANNELS),
            classes=self.release.classes,
            train_size=sum(self.release.train.values()),
            eval_size=sum(self.release.eval.values()),
        )

    def declare(self, cache: Path) -> RawData | None:
        if self.root is not None or find_release(cache / self.name, self.release) is not None:
            return None
        return make_blank_data(self.facts(), self.class_names)

    def read(self, cache: Path) -> RawData:
        """Return images, uint8 (n, 32, 32, 3), and labels, int32 (n,)."""
        downloads = cache / self.name
        path = find_release(self.root or downloads, self.release)
        if path is None and self.root is not None:
            if not self.root.exists():
                raise DataError(f"dataset.root = {self.root}: there is no such file or folder")
            unpacked = self.root / self.release.folder
            folder = unpacked if unpacked.is_dir() else self.root
            missing = [name for name in self.release.file_bytes if not (folder / name).is_file()]
            raise DataError(
                f"{folder} lacks {', '.join(missing)}; dataset.root must be the folder of the .bin "
                f"files, the folder above {self.release.folder}, the archive {self.release.stem}"
                ".tar.gz or .tar.xz, the folder of the archive, or null to download the archive"
            )
        if path is None:
            fetch_all(self.name, [self.archive], self.mirrors, downloads)
            path = downloads / self.archive.name
        folder = path
        if path.is_file():
            is_download = self.root is None and path.name == self.archive.name
            published = self.archive if is_download else None
            folder = unpack(path, self.release, downloads, published)
        return RawData(
            train=read_split(folder, self.release.train, self.release),
            eval=read_split(folder, self.release.eval, self.release),
            targets=Targets(self.class_names),
        )


@component("dataset")
class Cifar10(CifarDataset):
    """Ten kinds of animals and vehicles, by A. Krizhevsky, V. Nair and G. Hinton."""

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


@component("dataset")
class Cifar100(CifarDataset):
    """Images of a hundred classes. The 20 coarse classes in the records aren't read."""

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
    """Return the folder of the .bin files at `root`, else their archive, else None."""
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
    """Return the folder below `cache` with the archive's .bin files, after unpacking them if they
    are missing or have changed.

    The folder's name has the archive's checksum, so a changed archive is unpacked into another
    folder. `published` is the description of a downloaded archive. Such an archive is only read if
    it has to be unpacked. Raises DataError with the archive if it can't be unpacked.
    """
    digest = _hash_archive(archive, release) if published is None else published.md5
    folder = cache / f"{release.folder}-{digest[:16]}"
    with lock_data_folder(cache):
        if not has_recorded_sums(folder, release.file_bytes):
            if published is not None:
                require_published(archive, published)
            if (folder / SUMS).exists():
                log.warning("%s: was changed; unpacking %s again", folder, archive)
            _unpack_into(archive, release, folder)
    return folder


def _hash_archive(archive: Path, release: Release) -> str:
    """Return the checksum of an archive. Raises DataError if it is too large."""
    with name_file(archive):
        size_bytes = archive.stat().st_size
        if size_bytes > release.max_archive_bytes:
            raise ValueError(
                f"has {size_bytes:,} bytes; it can't be {release.stem}, which has "
                f"{release.max_archive_bytes:,} at most"
            )
        return compute_checksum(archive)


def _unpack_into(archive: Path, release: Release, folder: Path) -> None:
    """Unpack the .bin files into `folder`, and write their checksums. Raises DataError with the
    archive if it can't be read or the folder can't be written."""
    scratch = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        make_private(scratch)
        _copy_members(archive, release, scratch)
        (scratch / SUMS).write_text(format_checksums(scratch, release.file_bytes))
        make_private(folder)
        # Another process may read the folder now, so each file is moved into it as a whole. The
        # checksums are moved last: they mark the folder as complete.
        for name in (*release.file_bytes, SUMS):
            commit(scratch / name, folder / name)
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error, ValueError) as error:
        raise DataError(f"{archive}: can't be unpacked into {folder}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _copy_members(archive: Path, release: Release, folder: Path) -> None:
    """Copy the .bin files of an archive into `folder`. Paths in the archive are ignored, since they
    could lead out of it. Raises ValueError for a missing file, and for a wrong size or suffix."""
    missing = dict(release.file_bytes)
    suffixes = [suffix for suffix in _OPENERS if archive.name.endswith(suffix)]
    if not suffixes:
        raise ValueError(f"it must be one of {', '.join(_OPENERS)}")
    with _OPENERS[suffixes[0]](archive, "rb") as unbounded:
        stream = _BoundedStream(unbounded, release.max_archive_bytes)
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                content = tar.extractfile(member) if member.isfile() else None
                if content is None or name not in missing:
                    continue
                expected_bytes = missing.pop(name)
                if member.size != expected_bytes:
                    raise ValueError(f"{name} has {member.size:,} bytes, not {expected_bytes:,}")
                with (folder / name).open("wb") as target:
                    shutil.copyfileobj(content, target, _CHUNK_BYTES)
        # Reading to the end verifies the checksum of the compressed content.
        while stream.read(_CHUNK_BYTES):
            pass
    if missing:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")


class _BoundedStream(io.RawIOBase):
    """A stream that raises ValueError if its content has more than `max_bytes`."""

    def __init__(self, stream: IO[bytes], max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._remaining_bytes = max_bytes

    def read(self, size: int = -1) -> bytes:
        max_bytes = self._remaining_bytes + 1  # One more byte shows that the content is too long.
        content = self._stream.read(max_bytes if size < 0 else min(size, max_bytes))
        self._remaining_bytes -= len(content)
        if self._remaining_bytes < 0:
            raise ValueError(f"it unpacks to more than {self._max_bytes:,} bytes")
        return content


def read_split(folder: Path, files: Mapping[str, int], release: Release) -> Split:
    """Read the records of all files, in order. `files` has their numbers of records by name. Raises
    DataError with the file if it can't be read or is damaged."""
    pieces = [read_records(folder / name, count, release) for name, count in files.items()]
    images = np.concatenate([images for images, _ in pieces])
    labels = np.concatenate([labels for _, labels in pieces])
    return Split({"image": images, "label": labels})


def read_records(path: Path, count: int, release: Release) -> tuple[np.ndarray, np.ndarray]:
    """Read images, uint8 (count, 32, 32, 3), and labels, int32 (count,), from one .bin file. A
    record has the label bytes, then the red, green and blue planes, row by row. Raises DataError
    for a file of another size, and for a label that isn't a class."""
    record_bytes = release.label_bytes + _IMAGE_BYTES
    expected_bytes = count * record_bytes
    with name_file(path):
        size_bytes = path.stat().st_size
        content = np.fromfile(path, np.uint8, expected_bytes)
        if size_bytes != expected_bytes:
            raise ValueError(
                f"has {size_bytes:,} bytes instead of {expected_bytes:,} "
                f"({count:,} records of {record_bytes:,} bytes)"
            )
        records = content.reshape(count, record_bytes)
        labels = records[:, release.label_bytes - 1].astype(np.int32)
        if labels.max() >= release.classes:
            record = int(labels.argmax())
            raise ValueError(
                f"label {labels[record]} of record {record:,} must be 0 to {release.classes - 1}"
            )
    planes = records[:, release.label_bytes :].reshape(count, _CHANNELS, _SIDE, _SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels
