"""MNIST and Fashion-MNIST: two IDX files of 28x28 grey images, and two of their labels."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.registry import component
from pipeline.data.columns import RawData, Split, Targets
from pipeline.data.copies.checksums import RemoteFile
from pipeline.data.copies.download import fetch_all, require_published
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.image_facts import ImageFacts, make_blank_data

_UINT8 = 0x08
"""IDX's code of the type uint8."""
_SIDE = 28


class IdxDataset(DatasetSpec):
    """Base of the sources in four IDX files, gzipped or not: 60,000 training and 10,000 evaluation
    images, grey, of 28x28 pixels, in ten classes."""

    files: ClassVar[tuple[RemoteFile, ...]]
    class_names: ClassVar[tuple[str, ...]]

    def facts(self) -> ImageFacts:
        return ImageFacts(image=(_SIDE, _SIDE, 1), classes=10, train_size=60_000, eval_size=10_000)

    def declare(self, cache: Path) -> RawData | None:
        if self.root is not None or not self._list_missing(cache / self.name):
            return None
        return make_blank_data(self.facts(), self.class_names)

    def _list_missing(self, folder: Path) -> list[RemoteFile]:
        return [file for file in self.files if not find_idx(folder, file.name).is_file()]

    def read(self, cache: Path) -> RawData:
        """Return images, uint8 (n, 28, 28, 1), and labels, int32 (n,)."""
        folder = self.root or cache / self.name
        missing = self._list_missing(folder)
        if self.root is None:
            fetch_all(self.name, missing, self.mirrors, folder)
            for file in self.files:
                path = find_idx(folder, file.name)
                if path.name == file.name:  # An unpacked file has no published checksum.
                    require_published(path, file)
        elif missing:
            names = ", ".join(file.name for file in missing)
            raise DataError(
                f"{folder} lacks {names} (with or without .gz); dataset.root must be the folder "
                f"that holds the files of {self.name}, or null to download them"
            )
        sizes = self.facts()
        return RawData(
            train=read_split(folder, "train", sizes.train_size),
            eval=read_split(folder, "t10k", sizes.eval_size),
            targets=Targets(self.class_names),
        )


@component("dataset")
class Mnist(IdxDataset):
    """Handwritten digits, by Y. LeCun, C. Cortes and C. Burges."""

    name: Literal["mnist"] = "mnist"
    files = (
        RemoteFile("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
        RemoteFile("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        RemoteFile("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
        RemoteFile("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    )
    class_names = tuple("0123456789")


@component("dataset")
class FashionMnist(IdxDataset):
    """Zalando's articles of clothing, in the format and sizes of MNIST."""

    name: Literal["fashion_mnist"] = "fashion_mnist"
    files = (
        RemoteFile("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        RemoteFile("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        RemoteFile("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        RemoteFile("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    )
    # fmt: off
    class_names = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
        "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )
    # fmt: on


def find_idx(folder: Path, name: str) -> Path:
    """Return the path of a file in `folder`: the unpacked file if it exists, else the .gz file."""
    unpacked = folder / name.removesuffix(".gz")
    return unpacked if unpacked.is_file() else folder / f"{unpacked.name}.gz"


def read_split(folder: Path, prefix: str, count: int) -> Split:
    """Read the images and labels of a split of `count` samples, from the files that begin with
    `prefix`. Raises DataError for a missing or damaged file."""
    images = read_idx(find_idx(folder, f"{prefix}-images-idx3-ubyte"), (count, _SIDE, _SIDE))
    path = find_idx(folder, f"{prefix}-labels-idx1-ubyte")
    labels = read_idx(path, (count,))
    if labels.max() > 9:
        sample = int(labels.argmax())
        raise DataError(f"{path}: label {labels[sample]} of sample {sample:,} must be 0 to 9")
    return Split({"image": images[..., np.newaxis], "label": labels.astype(np.int32)})


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read the uint8 values of an IDX file, gzipped or not, in `shape`. The file has two zeros, the
    type's code, the number of dimensions, each dimension as a big-endian uint32, and the values.
    Raises DataError with the file if it is damaged, or has another shape."""
    header = struct.Struct(f">HBB{len(shape)}I")
    values_bytes = math.prod(shape)
    # One byte more than expected shows that the file is longer, and limits decompression.
    max_bytes = header.size + values_bytes + 1
    try:
        open_file = gzip.open if path.suffix == ".gz" else open
        with open_file(path, "rb") as file:
            content = file.read(max_bytes)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: can't be read: {error}") from error
    if len(content) < header.size:
        raise DataError(f"{path}: {len(content)} bytes are too short for an IDX header")
    zero, dtype, dimensions, *sizes = header.unpack_from(content)
    if (zero, dtype, dimensions) != (0, _UINT8, len(shape)):
        expected = struct.pack(">HBB", 0, _UINT8, len(shape)).hex()
        raise DataError(f"{path}: begins with {content[:4].hex()}; must begin with {expected}")
    if tuple(sizes) != shape:
        raise DataError(f"{path}: has shape {tuple(sizes)} instead of {shape}")
    if len(content) - header.size != values_bytes:
        relation = "fewer" if len(content) - header.size < values_bytes else "more"
        raise DataError(
            f"{path}: has {relation} bytes than the {values_bytes:,} values it announces"
        )
    return np.frombuffer(content, np.uint8, offset=header.size).reshape(shape)
