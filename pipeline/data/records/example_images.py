"""Images and labels from the features of tf.train.Examples in TFRecord files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.error_text import show_name
from pipeline.data.columns import read_samples
from pipeline.data.file_errors import name_file
from pipeline.data.image_file import (
    FORMATS,
    KINDS,
    UNREADABLE_IMAGE,
    open_image,
    read_pixels,
    read_upright_size,
)
from pipeline.data.records.tf_example import Feature, parse_example
from pipeline.data.records.tfrecord_file import RecordSpans, scan_records

IMAGE_KEYS = ("image/encoded", "image", "image_raw", "image/raw")
LABEL_KEYS = ("image/class/label", "label")
SIZE_KEYS = (("height", "width", "depth"), ("image/height", "image/width", "image/channels"))
"""Names of the features with the height, width and channels of plain pixels."""
_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"GIF8", b"RIFF")
"""First bytes of image files that `open_image` reads."""

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class ExampleSettings:
    """Settings of a recipe for examples; None: inferred from the first example."""

    image_key: str | None = None
    label_key: str | None = None
    image_size: Sequence[int] | None = None
    """(height, width) that image files are resized to."""
    image_shape: Sequence[int] | None = None
    """(height, width, channels) of plain pixels."""


@dataclass(frozen=True)
class ExampleImages:
    """A column of images of examples, read and decoded on demand."""

    files: Sequence[RecordSpans]
    rows: np.ndarray
    """The file of each sample and the record in the file, int64 (n, 2)."""
    key: str
    value_shape: Shape
    encoded: bool
    """Whether images are files such as PNG, which are decoded as RGB, else plain pixels."""

    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        """(samples, height, width, channels)."""
        return (len(self.rows), *self.value_shape)

    def __getitem__(self, indices: Any) -> np.ndarray:
        """Return the images at an integer array of indices or a slice, uint8 (n, H, W, C)."""
        return read_samples(self, indices)

    def sample(self, index: int) -> np.ndarray:
        """Return one image, uint8 (H, W, C). Raises DataError that names a bad record."""
        file, record = self.rows[index].tolist()
        try:
            features = parse_example(self.files[file].read(record))
            content = _find_image(features, self.key)
            if not self.encoded:
                return np.frombuffer(content, np.uint8).reshape(self.value_shape)
            with open_image(content, FORMATS) as image:
                return read_pixels(image, *self.value_shape[:2])
        except (*UNREADABLE_IMAGE, KeyError) as error:
            raise DataError(f"{self.sample_name(index)}: {error}") from error

    def sample_name(self, index: int) -> str:
        """Return the file and record of a sample, for messages."""
        file, record = self.rows[index].tolist()
        return f"{self.files[file].path}, record {record}"

    def count_by_file(self) -> tuple[int, ...]:
        """Return the number of samples of each file, which may be 0."""
        return tuple(np.bincount(self.rows[:, 0], minlength=len(self.files)).tolist())


@dataclass(frozen=True)
class Examples:
    """The images of files and their labels, in the order of the files."""

    images: ExampleImages
    labels: np.ndarray
    """int64 (n,) for classes, float32 (n, K) for numbers."""
    label_key: str

    def at(self, rows: np.ndarray) -> Examples:
        """Return the examples of these rows."""
        images = replace(self.images, rows=self.images.rows[rows])
        return replace(self, images=images, labels=self.labels[rows])


def read_examples(paths: Sequence[Path], settings: ExampleSettings) -> Examples:
    """Read the labels of all records, the positions of records, and the size of images. Raises
    DataError that names the file, the record and the problem."""
    spans = []
    rows = []
    labels: list[int | np.ndarray] = []
    layout: _Layout | None = None
    for number, path in enumerate(paths):
        starts: list[int] = []
        lengths: list[int] = []
        with name_file(path):
            for start, content in scan_records(path):
                record = len(starts)
                try:
                    features = parse_example(content)
                    layout = layout or _find_layout(features, settings)
                    layout.require(features)
                    labels.append(layout.label(features))
                except UNREADABLE_IMAGE as error:
                    raise ValueError(f"record {record}: {error}") from error
                starts.append(start)
                lengths.append(len(content))
        spans.append(RecordSpans(path, np.array(starts, np.int64), np.array(lengths, np.int64)))
        rows.append(np.stack([np.full(len(starts), number), np.arange(len(starts))], axis=1))
    if layout is None:
        raise DataError(f"{paths[0]}: has no records, like all the files of its split")
    images = ExampleImages(
        spans, np.concatenate(rows), layout.image_key, layout.shape, layout.encoded
    )
    return Examples(images, np.array(labels), layout.label_key)


@dataclass(frozen=True)
class _Layout:
    """The layout of the first example, which all examples must have."""

    image_key: str
    label_key: str
    shape: Shape
    encoded: bool
    resized: bool
    num_floats: int | None
    """Number of floats of a label; None for a class."""

    def require(self, features: Mapping[str, Feature]) -> None:
        """Raise an error of `UNREADABLE_IMAGE` if the image has another layout."""
        content = _find_image(features, self.image_key)
        if not self.encoded:
            if len(content) != math.prod(self.shape):
                height, width, channels = self.shape
                raise ValueError(
                    f"{show_name(self.image_key)} has {len(content):,} bytes; {height}x{width} "
                    f"pixels of {channels} channels are {math.prod(self.shape):,}; "
                    "must match dataset.image_shape"
                )
        elif not self.resized:
            height, width = _read_encoded_size(content)
            if (height, width) != self.shape[:2]:
                raise ValueError(
                    f"is {height}x{width}, but the first is {self.shape[0]}x{self.shape[1]}; "
                    "set dataset.image_size=[H,W] to resize all"
                )

    def label(self, features: Mapping[str, Feature]) -> int | np.ndarray:
        """Return the label of an example. Raises ValueError for another dtype or length."""
        label = features.get(self.label_key)
        expected = "one integer" if self.num_floats is None else f"{self.num_floats} floats"
        dtype = np.int64 if self.num_floats is None else np.float32
        if not isinstance(label, np.ndarray) or label.dtype != dtype:
            raise ValueError(f"{show_name(self.label_key)} must hold {expected}")
        if len(label) != (self.num_floats or 1):
            raise ValueError(f"{show_name(self.label_key)} has {len(label)} values, not {expected}")
        if self.num_floats is None:
            return int(label[0])
        if not np.isfinite(label).all():
            raise ValueError(f"{show_name(self.label_key)} has {label.tolist()}; must be finite")
        return label


def _find_layout(features: Mapping[str, Feature], settings: ExampleSettings) -> _Layout:
    """Return the layout of the first example. Raises ValueError that names a missing feature."""
    image_key = _find_key(features, settings.image_key, IMAGE_KEYS, "image_key")
    label_key = _find_key(features, settings.label_key, LABEL_KEYS, "label_key")
    content = _find_image(features, image_key)
    label = features[label_key]
    if isinstance(label, tuple):
        raise ValueError(f"{show_name(label_key)} has bytes; a label must be a number")
    encoded = settings.image_shape is None and content.startswith(_SIGNATURES)
    if settings.image_shape is not None:
        height, width, channels = settings.image_shape
    elif encoded:
        height, width = settings.image_size or _read_encoded_size(content)
        channels = 3
    else:
        height, width, channels = _find_plain_shape(features, image_key)
    return _Layout(
        image_key,
        label_key,
        shape=(height, width, channels),
        encoded=encoded,
        resized=encoded and settings.image_size is not None,
        num_floats=len(label) if label.dtype == np.float32 else None,
    )


def _find_key(
    features: Mapping[str, Feature], name: str | None, defaults: Sequence[str], setting: str
) -> str:
    """Return the first name that is a feature. Raises ValueError if none is."""
    for key in defaults if name is None else (name,):
        if key in features:
            return key
    key_list = ", ".join(show_name(key) for key in sorted(features)[:10]) or "nothing"
    names_text = " or ".join(defaults) if name is None else show_name(name)
    raise ValueError(f"has no feature {names_text}; it has {key_list}; set dataset.{setting}")


def _find_image(features: Mapping[str, Feature], key: str) -> bytes:
    """Return the bytes of an image. Raises ValueError if the feature has none or several."""
    values = features.get(key)
    if not isinstance(values, tuple) or len(values) != 1:
        raise ValueError(f"{show_name(key)} must hold the bytes of one image")
    return values[0]


def _read_encoded_size(content: bytes) -> tuple[int, int]:
    with open_image(content, FORMATS) as image:
        return read_upright_size(image)


def _find_plain_shape(features: Mapping[str, Feature], image_key: str) -> Shape:
    """Return (height, width, channels) of plain pixels. Raises ValueError if features lack it."""
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
