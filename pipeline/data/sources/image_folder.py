"""A user's own image files, one folder per class, decoded on demand (D-14)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from PIL import Image
from pydantic import Field, PositiveInt

from pipeline.data.columns import DECODING_THREADS, Column, RawData, Split
from pipeline.data.dataset_spec import GivenRoot, LocalDatasetSpec
from pipeline.data.image_file import UNREADABLE_IMAGE, eight_bits, open_image
from pipeline.data.padding.buckets import Ragged
from pipeline.data.targets import Targets
from pipeline.errors import DataError
from pipeline.registry import Seq, part

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")
EVAL_FOLDERS = ("eval", "val", "test")
_FORMATS = ("PNG", "JPEG", "BMP")

ImageSize = Annotated[Seq[PositiveInt], Field(min_length=2, max_length=2)]


@part("dataset")
class ImageFolder(LocalDatasetSpec):
    """`train/<class>/*.png` and `eval/<class>/*.png`; eval may be called val or test.

    PNG, JPEG and BMP are read, as RGB. Classes are the folders' names in alphabetical order.
    """

    root_must_be = "a folder with train/<class>/ and eval/<class>/"
    name: Literal["image_folder"] = "image_folder"
    root: GivenRoot
    """The folder that holds train and eval."""
    follow_links: bool = False
    """Read links to images and folders outside of `root` too."""
    image_size: ImageSize | None = None
    """[height, width] to resize to on decoding; null: all images must have one size, or are padded
    to `buckets`."""

    def read(self, cache: Path) -> RawData:
        """Images uint8 (n, H, W, 3), decoded on demand; labels int32 (n,)."""
        train_folder, eval_folder = find_splits(self.root)
        within = None if self.follow_links else self.root.resolve()
        classes = class_names(train_folder)
        if class_names(eval_folder) != classes:
            odd = sorted(set(classes) ^ set(class_names(eval_folder)))
            raise DataError(
                f"{train_folder} and {eval_folder} must have the same class folders; "
                f"only one of them has {', '.join(odd)}"
            )
        train_paths, train_labels = list_images(train_folder, classes, within)
        eval_paths, eval_labels = list_images(eval_folder, classes, within)
        train, evaluated = self._images(train_paths, eval_paths)
        return RawData(
            train=Split({"image": train, "label": train_labels}),
            eval=Split({"image": evaluated, "label": eval_labels}),
            targets=Targets(classes),
        )

    def _images(self, *paths: Sequence[str]) -> list[Column]:
        """The images of each list, of one size unless they are to be padded."""
        if self.buckets is not None and self.image_size is None:
            return [ImagesOfSeveralSizes(own, read_sizes(own)) for own in paths]
        height, width = self.image_size or common_size([path for own in paths for path in own])
        return [ImageFiles(own, height, width) for own in paths]


@dataclass(frozen=True)
class ImageFiles:
    """A column of image files, decoded to RGB of one size whenever they are indexed."""

    paths: Sequence[str]
    height: int
    width: int

    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        """(files, height, width, 3)."""
        return (len(self.paths), self.height, self.width, 3)

    def __getitem__(self, indices: Any) -> np.ndarray:
        """The images at an integer array of indices or a slice, uint8 (n, height, width, 3)."""
        chosen = np.arange(len(self.paths))[indices]
        images = np.empty((len(chosen), *self.shape[1:]), np.uint8)
        with ThreadPoolExecutor(DECODING_THREADS) as pool:
            decoded = pool.map(self.sample, chosen)
            for position, image in enumerate(decoded):
                images[position] = image
        return images

    def sample(self, index: int) -> np.ndarray:
        """One image, uint8 (height, width, 3). Raises DataError that names a bad file."""
        return decode(self.paths[index], self.height, self.width)

    def sample_name(self, index: int) -> str:
        """The image's file."""
        return self.paths[index]


@dataclass(frozen=True)
class ImagesOfSeveralSizes(Ragged):
    """A column of image files, decoded to RGB in their own size on demand."""

    paths: Sequence[str]
    sizes: np.ndarray

    dtype = np.dtype(np.uint8)
    trailing = (3,)

    def value(self, index: int) -> np.ndarray:
        """One image, uint8 (height, width, 3). Raises DataError that names a bad file."""
        height, width = self.sizes[index].tolist()
        return decode(self.paths[index], height, width)

    def sample_name(self, index: int) -> str:
        """The image's file."""
        return self.paths[index]


def read_sizes(paths: Sequence[str]) -> np.ndarray:
    """(height, width) of each image, int32 (files, 2)."""
    return np.array([_read_size(path) for path in paths], np.int32)


def find_splits(root: Path) -> tuple[Path, Path]:
    """The training and the evaluation folder of `root`. Raises DataError where one is missing."""
    train = root / "train"
    candidates = [root / name for name in EVAL_FOLDERS]
    evaluation = next((folder for folder in candidates if folder.is_dir()), None)
    if not train.is_dir() or evaluation is None:
        raise DataError(f"{root}: must have the folders train and one of {', '.join(EVAL_FOLDERS)}")
    return train, evaluation


def class_names(folder: Path) -> tuple[str, ...]:
    """The names of the folders in `folder`, sorted; hidden ones don't count."""
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    if not names:
        raise DataError(f"{folder}: must have one folder per class; it has none")
    return tuple(sorted(names))


def list_images(
    folder: Path, classes: Sequence[str], within: Path | None = None
) -> tuple[list[str], np.ndarray]:
    """The image files of each class in `folder`, sorted by name, and their labels, int32.

    Raises DataError for a class without images, and for a link that leads out of `within`.
    """
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        _require_within(folder / name, within)
        with os.scandir(folder / name) as entries:
            images = [entry for entry in entries if _is_image(entry)]
        for entry in images:
            if entry.is_symlink():
                _require_within(Path(entry.path), within)
        images.sort(key=lambda entry: entry.name)
        if not images:
            raise DataError(f"{folder / name}: holds no image ({', '.join(SUFFIXES)})")
        paths += [entry.path for entry in images]
        labels += [label] * len(images)
    return paths, np.array(labels, np.int32)


def common_size(paths: Sequence[str]) -> tuple[int, int]:
    """(height, width) of all images. Raises DataError that names one which differs."""
    sizes = [_read_size(path) for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        if size != sizes[0]:
            raise DataError(
                f"{path}: is {size[0]}x{size[1]} where {paths[0]} is {sizes[0][0]}x{sizes[0][1]}; "
                "give dataset.image_size=[H,W] to resize all"
            )
    return sizes[0]


def decode(path: str, height: int, width: int) -> np.ndarray:
    """An image as RGB, resized bilinearly where its size differs: uint8 (height, width, 3)."""
    with _opened(path) as image:
        rgb = eight_bits(image).convert("RGB")
    if rgb.size != (width, height):
        rgb = rgb.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(rgb)


def _read_size(path: str) -> tuple[int, int]:
    with _opened(path) as image:
        return image.height, image.width


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    try:
        with open_image(Path(path), _FORMATS) as image:
            yield image
    except UNREADABLE_IMAGE as error:
        raise DataError(f"{path}: can't be read as an image: {error}") from error


def _is_image(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is an image file; a pipe of such a name would never end."""
    named = entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".")
    return named and entry.is_file()


def _require_within(path: Path, folder: Path | None) -> None:
    if folder is not None and not path.resolve().is_relative_to(folder):
        raise DataError(
            f"{path}: leads out of {folder}, to {path.resolve()}; copy what is there, or give "
            "dataset.follow_links=true on the command line"
        )
