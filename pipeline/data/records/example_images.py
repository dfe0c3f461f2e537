"""Images and labels from the features of examples in files of TFRecord, MindRecord or tars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import show
from pipeline.core.registry import MAX_FLOAT, MAX_INT
from pipeline.data.columns import LazyColumn
from pipeline.data.file_errors import name_file
from pipeline.data.image_file import (
    FORMATS,
    KINDS,
    UNREADABLE_IMAGE,
    open_image,
    read_pixels,
    read_upright_size,
)
from pipeline.data.records.mindrecord_file import MindRecordFile
from pipeline.data.records.tar_shard import TarShard
from pipeline.data.records.tfrecord_file import Feature, TFRecordFile, Visit

IMAGE_KEYS = ("image/encoded", "image", "image_raw", "image/raw", "data")
LABEL_KEYS = ("image/class/label", "label")
"""Names of the features with the image and with the label. The first name that exists is used."""
SIZE_KEYS = (("height", "width", "depth"), ("image/height", "image/width", "image/channels"))
"""Names of the features with the height, width and channels of plain pixels."""
EDGES = ("ymin", "xmin", "ymax", "xmax")
"""Ends of the names of features with the edges of bounding boxes."""
_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"GIF8", b"RIFF", b"II*\0", b"MM\0*")
"""First bytes of image files that `open_image` reads."""
Shape = tuple[int, int, int]
ExampleFile = MindRecordFile | TarShard | TFRecordFile
IndexFile = Callable[[Path, Visit], ExampleFile]
"""Function that calls `Visit` for each example of a file, and returns the file to read from it."""


@dataclass(frozen=True)
class ExampleSettings:
    """A recipe's settings for examples. `ExampleFilesSpec` and `MindRecord` describe the fields."""

    image_key: str | None = None
    label_key: str | None = None
    image_size: Sequence[int] | None = None
    image_shape: Sequence[int] | None = None
    image_layout: Literal["hwc", "chw"] = "hwc"
    box_key: str | None = None


@dataclass(frozen=True)
class ExampleImages(LazyColumn):
    """A column of the images in examples, read and decoded on demand."""

    files: Sequence[ExampleFile]
    rows: np.ndarray
    """The index of each sample's file and of its record in the file, int64 (n, 2)."""
    layout: ImageLayout

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8 for files and pixels; float32 or int32 for arrays."""
        return np.dtype(self.layout.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """(samples, height, width, channels), or (samples, length)."""
        return (len(self.rows), *self.layout.shape)

    def sample(self, index: int) -> np.ndarray:
        file, record = self.rows[index].tolist()
        try:
            return self.layout.read_image(self.files[file].read_example(record))
        except (*UNREADABLE_IMAGE, KeyError) as error:
            raise DataError(f"{self.sample_name(index)}: {error}") from error

    def sample_name(self, index: int) -> str:
        file, record = self.rows[index].tolist()
        return f"{self.files[file].path}, record {record}"

    def count_by_file(self) -> tuple[int, ...]:
        """Return the number of samples of each file. It is 0 for a file without samples."""
        return tuple(np.bincount(self.rows[:, 0], minlength=len(self.files)).tolist())


@dataclass(frozen=True)
class Examples:
    """The images and labels of several files, in the order of the files."""

    images: ExampleImages
    labels: np.ndarray
    """int64 (n,) for classes, float32 (n, K) for numbers."""
    label_key: str
    """The name of the feature with the label."""
    boxes: np.ndarray | None = None
    """Bounding boxes, float32 (n, most boxes of a sample, 4), with zeros after a sample's boxes;
    None if they aren't read."""

    def select_rows(self, rows: np.ndarray) -> Examples:
        images = replace(self.images, rows=self.images.rows[rows])
        boxes = None if self.boxes is None else self.boxes[rows]
        return replace(self, images=images, labels=self.labels[rows], boxes=boxes)


def read_examples(
    paths: Sequence[Path], index_file: IndexFile, settings: ExampleSettings
) -> Examples:
    """Return the labels of all records, and a column of their images. All records are read once, to
    check their layout. Raises DataError with the file, the record and the problem."""
    files: list[ExampleFile] = []
    rows: list[tuple[int, int]] = []
    labels: list[int | np.ndarray] = []
    boxes: list[np.ndarray] = []
    layout: _ExampleLayout | None = None

    def visit(record: int, features: Mapping[str, Feature]) -> None:
        nonlocal layout
        try:
            if layout is None:
                layout = _find_layout(features, settings)
            layout.image.require(features)
            labels.append(layout.read_label(features))
            if settings.box_key is not None:
                boxes.append(read_boxes(features, settings.box_key))
        except UNREADABLE_IMAGE as error:
            raise ValueError(f"record {record}: {error}") from error
        rows.append((len(files), record))

    for path in paths:
        with name_file(path):
            files.append(index_file(path, visit))
    if layout is None:
        raise DataError(f"{paths[0]}: has no records, like all the files of its split")
    images = ExampleImages(files, np.array(rows, np.int64), layout.image)
    stacked = None if settings.box_key is None else stack_boxes(boxes)
    return Examples(images, np.array(labels), layout.label_key, stacked)


def read_boxes(features: Mapping[str, Feature], key: str) -> np.ndarray:
    """Return the bounding boxes of an example, float32 (boxes, 4), from its features KEY/ymin,
    KEY/xmin, KEY/ymax and KEY/xmax. Raises ValueError for other lengths, or numbers that aren't
    shares of an image. An example without these features has none."""
    edges = [np.asarray(features.get(f"{key}/{edge}", ()), np.float32) for edge in EDGES]
    if any(edge.ndim != 1 or edge.shape != edges[0].shape for edge in edges):
        lengths = ", ".join(f"{name} {edge.size}" for name, edge in zip(EDGES, edges, strict=True))
        raise ValueError(f"{show_name(key)}: has other numbers of edges: {lengths}")
    boxes = np.stack(edges, axis=1)
    is_inside = (boxes >= 0) & (boxes <= 1)
    if not (is_inside.all() and (boxes[:, :2] <= boxes[:, 2:]).all()):
        raise ValueError(
            f"{show_name(key)}: must have edges from 0 to 1, each minimum before its maximum"
        )
    return boxes


def stack_boxes(boxes: Sequence[np.ndarray] | np.ndarray, most: int = 1) -> np.ndarray:
    """Return the boxes of all examples, float32 (examples, most boxes or `most`, 4), zeros after
    the last of each."""
    stacked = np.zeros((len(boxes), max([most, *map(len, boxes)]), 4), np.float32)
    for row, sample_boxes in zip(stacked, boxes, strict=True):
        row[: len(sample_boxes)] = sample_boxes
    return stacked


@dataclass(frozen=True)
class ImageLayout:
    """The layout of the first image, which all images must have."""

    key: str
    """The name of the feature with the image."""
    kind: Literal["file", "pixels", "array"]
    """file: a file such as PNG, read as RGB. pixels: plain bytes. array: numbers with a shape."""
    shape: tuple[int, ...]
    """(height, width, channels); (length,) of tokens and of other rows of numbers."""
    is_resized: bool = False
    """Whether files may differ in size, and are resized to `shape`."""
    dtype: Literal["uint8", "int32", "float32"] = "uint8"
    channel_axis: int = -1
    """The axis of an array that has the channels."""

    @property
    def column(self) -> str:
        """The name of the column: image, tokens for whole numbers in a row, else features."""
        if len(self.shape) == 3:
            return "image"
        return "tokens" if self.dtype == "int32" else "features"

    def read_image(self, features: Mapping[str, Feature]) -> np.ndarray:
        """Return the sample of an example, in `shape`. Raises an error of `UNREADABLE_IMAGE`."""
        if self.kind == "array":
            values = np.asarray(features[self.key]).astype(self.dtype)
            return _as_sample(values, self.channel_axis).reshape(self.shape)
        content = _find_bytes(features, self.key)
        if self.kind == "pixels":
            return np.frombuffer(content, np.uint8).reshape(self.shape)
        with open_image(content, FORMATS) as image:
            height, width, _ = self.shape
            return read_pixels(image, height, width)

    def require(self, features: Mapping[str, Feature]) -> None:
        """Raise an error of `UNREADABLE_IMAGE` if the image has another layout."""
        if self.kind == "array":
            layout = _find_array_layout(self.key, features.get(self.key), self.channel_axis)
            if layout != self:
                raise ValueError(
                    f"{show_name(self.key)} is {layout.dtype} of shape {layout.shape}, but the "
                    f"first is {self.dtype} of shape {self.shape}"
                )
            return
        content = _find_bytes(features, self.key)
        if self.kind == "pixels":
            if len(content) != math.prod(self.shape):
                height, width, channels = self.shape
                raise ValueError(
                    f"{show_name(self.key)} has {len(content):,} bytes; {height}x{width} "
                    f"pixels of {channels} channels are {math.prod(self.shape):,}; "
                    "must match dataset.image_shape"
                )
        elif not self.is_resized:
            height, width = _read_encoded_size(content)
            if (height, width) != self.shape[:2]:
                raise ValueError(
                    f"is {height}x{width}, but the first is {self.shape[0]}x{self.shape[1]}; "
                    "set dataset.image_size=[H,W] to resize all"
                )


@dataclass(frozen=True)
class _ExampleLayout:
    """The layout of the first example, which all examples must have."""

    image: ImageLayout
    label_key: str
    num_floats: int | None
    """Number of floats of a label; None for a class."""

    def read_label(self, features: Mapping[str, Feature]) -> int | np.ndarray:
        """Return the label of an example: the number of a class, or float32 (num_floats,). Raises
        ValueError for another dtype or length."""
        label = _require_numbers(self.label_key, features.get(self.label_key))
        name = show_name(self.label_key)
        is_class = self.num_floats is None
        expected = "one integer" if is_class else f"{self.num_floats} floats"
        if label.dtype.kind not in ("i" if is_class else "if") or label.ndim > 1:
            raise ValueError(f"{name} must hold {expected}, as in the first example")
        if len(label) != (1 if is_class else self.num_floats):
            raise ValueError(f"{name} has {len(label)} values, not {expected}")
        if is_class:
            return int(label[0])
        with np.errstate(over="ignore"):
            numbers = label.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise ValueError(f"{name} has {label.tolist()}; must be finite")
        return numbers


def _find_layout(features: Mapping[str, Feature], settings: ExampleSettings) -> _ExampleLayout:
    """Return the layout of the first example. Raises ValueError for a missing or wrong feature."""
    image_key = _find_key(features, settings.image_key, IMAGE_KEYS, "image_key")
    label_key = _find_key(features, settings.label_key, LABEL_KEYS, "label_key")
    label = _require_numbers(label_key, features[label_key])
    num_floats = label.size if label.dtype.kind == "f" else None
    return _ExampleLayout(_find_image_layout(features, image_key, settings), label_key, num_floats)


def _require_numbers(key: str, label: Feature | None) -> np.ndarray:
    """Return the numbers of a label. Raises ValueError if it is missing, or has bytes."""
    if label is None:
        raise ValueError(f"{show_name(key)} is missing")
    if isinstance(label, tuple):
        value = show(b" ".join(label)[:20])
        raise ValueError(f"{show_name(key)} has bytes, {value}; a label must be a number")
    return label


def _find_image_layout(
    features: Mapping[str, Feature], key: str, settings: ExampleSettings
) -> ImageLayout:
    """Return the layout of the image of the first example. Raises ValueError if neither the image
    nor other features have its size, and the recipe doesn't set it."""
    value = features[key]
    if isinstance(value, np.ndarray) and value.size > 1:
        return _find_array_layout(key, value, -1 if settings.image_layout == "hwc" else 0)
    content = _find_bytes(features, key)
    if settings.image_shape is not None:
        height, width, channels = settings.image_shape
        return ImageLayout(key, "pixels", (height, width, channels))
    if content.startswith(_SIGNATURES):
        height, width = settings.image_size or _read_encoded_size(content)
        return ImageLayout(key, "file", (height, width, 3), settings.image_size is not None)
    return ImageLayout(key, "pixels", _find_plain_shape(features, key))


def _find_array_layout(key: str, values: Feature | None, channel_axis: int) -> ImageLayout:
    """Return the layout of an array. Raises ValueError if it isn't an image or a list of tokens, or
    has values beyond int32 or float32."""
    if not isinstance(values, np.ndarray) or not 1 <= values.ndim <= 3 or not values.size:
        raise ValueError(f"{show_name(key)} must be an image, of at most 3 axes, or tokens")
    dtype: Literal["int32", "float32"] = "int32" if values.dtype.kind == "i" else "float32"
    limit = MAX_INT if dtype == "int32" else MAX_FLOAT
    # The absolute value of the least int64 is negative.
    if not ((values >= -limit) & (values <= limit)).all():
        raise ValueError(f"{show_name(key)} has values that {dtype} can't hold")
    shape = _as_sample(values, channel_axis).shape
    return ImageLayout(key, "array", shape, dtype=dtype, channel_axis=channel_axis)


def _as_sample(values: np.ndarray, channel_axis: int) -> np.ndarray:
    """Return an image as (height, width, channels), and a row of numbers as it is."""
    if values.ndim == 3:
        return np.moveaxis(values, channel_axis, -1)
    return values[..., np.newaxis] if values.ndim == 2 else values


def _find_key(
    features: Mapping[str, Feature], name: str | None, defaults: Sequence[str], setting: str
) -> str:
    """Return `name`, or if it is None the first of `defaults` that is a feature. Raises ValueError,
    which suggests `setting`, if that feature is missing."""
    for key in defaults if name is None else (name,):
        if key in features:
            return key
    present = ", ".join(show_name(key) for key in sorted(features)[:10]) or "nothing"
    expected = " or ".join(defaults) if name is None else show_name(name)
    raise ValueError(f"has no feature {expected}; it has {present}; set dataset.{setting}")


def _find_bytes(features: Mapping[str, Feature], key: str) -> bytes:
    """Return the bytes of an image. Raises ValueError if the feature isn't one piece of bytes."""
    values = features.get(key)
    if not isinstance(values, tuple) or len(values) != 1:
        raise ValueError(f"{show_name(key)} must hold the bytes of one image")
    return values[0]


def _read_encoded_size(content: bytes) -> tuple[int, int]:
    with open_image(content, FORMATS) as image:
        return read_upright_size(image)


def _find_plain_shape(features: Mapping[str, Feature], image_key: str) -> Shape:
    """Return (height, width, channels) of plain pixels, from the features `SIZE_KEYS`. Raises
    ValueError if they are missing or wrong."""
    for keys in SIZE_KEYS:
        sizes = [features.get(key) for key in keys]
        if all(isinstance(size, np.ndarray) and len(size) == 1 for size in sizes):
            height, width, channels = (int(size[0]) for size in sizes if size is not None)
            if min(height, width, channels) < 1:
                raise ValueError(f"has an image of {height}x{width} pixels, {channels} channels")
            return height, width, channels
    raise ValueError(
        f"{show_name(image_key)} isn't one of {KINDS}, and the example lacks the features "
        f"{', '.join(SIZE_KEYS[0])}; set dataset.image_shape=[H,W,C] for plain pixels"
    )
