"""Sources that need no download: random images with the sizes of another source, and MNIST-1D,
short series in the shapes of ten digits, made by a formula (Greydanus 2020)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal, cast

import numpy as np
from pydantic import PositiveInt, field_validator

from pipeline.core.host.memory import require_room
from pipeline.core.registry import component, list_components
from pipeline.data.columns import RawData, SampleUnit, Split, Targets
from pipeline.data.dataset_roots import RootlessDatasetSpec
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import name_file
from pipeline.data.image_facts import ImageFacts

_PATTERN_SEED = 0
_TRAIN_SEED = 1
_EVAL_SEED = 2
_CHUNK_IMAGES = 256
"""Number of images whose patterns are added at once, without a copy of the split."""
_PATTERN_CELLS = 4
"""Cells of a pattern along each side of an image."""


@component("dataset")
class Synthetic(DatasetSpec):
    """Images with the sizes of another source. An image is the pattern of its class plus noise, so
    that a network can learn the classes.

    `dataset.name=synthetic +dataset.like=mnist` replaces the source of a recipe and keeps its ops.
    Pixels are 0 to 254, also if the other source has fewer values, as digits has. `root` and
    `mirrors` are ignored.
    """

    name: Literal["synthetic"] = "synthetic"
    like: str
    """The name of the other source."""
    train_size: PositiveInt | None = None
    eval_size: PositiveInt | None = None
    """Numbers of samples in the splits; null: the other source's."""

    @field_validator("like")
    @classmethod
    def _require_known_sizes(cls, like: str) -> str:
        require_facts(like)
        return like

    def facts(self) -> ImageFacts:
        source = require_facts(self.like)
        return replace(
            source,
            train_size=self.train_size or source.train_size,
            eval_size=self.eval_size or source.eval_size,
        )

    def read(self, cache: Path) -> RawData:
        """Return images, uint8 (n, H, W, C), and labels, int32 (n,), the same in every run."""
        sizes = self.facts()
        samples = sizes.train_size + sizes.eval_size
        with name_file("dataset.train_size, dataset.eval_size"):
            require_room(samples * (math.prod(sizes.image) + 8), f"{samples:,} images")
        patterns = draw_patterns(sizes.classes, sizes.image)
        return RawData(
            train=draw_split(patterns, sizes.train_size, _TRAIN_SEED),
            eval=draw_split(patterns, sizes.eval_size, _EVAL_SEED),
            targets=Targets(tuple(str(label) for label in range(sizes.classes))),
        )


def draw_patterns(classes: int, image: tuple[int, int, int]) -> np.ndarray:
    """Draw an image of 4x4 plain cells for each class, uint8 (classes, H, W, C) from 0 to 127."""
    height, width, channels = image
    shape = (classes, _PATTERN_CELLS, _PATTERN_CELLS, channels)
    cells = np.random.default_rng(_PATTERN_SEED).integers(0, 128, shape, np.uint8)
    rows = np.arange(height) * _PATTERN_CELLS // height
    columns = np.arange(width) * _PATTERN_CELLS // width
    return cells[:, rows[:, np.newaxis], columns]


def draw_split(patterns: np.ndarray, size: int, seed: int) -> Split:
    """Draw `size` samples: images, uint8 (size, H, W, C), which are patterns plus noise from 0 to
    127, and labels, int32 (size,). Classes are equally frequent."""
    rng = np.random.default_rng(seed)
    labels = (rng.permutation(size) % len(patterns)).astype(np.int32)
    shape = (size, *patterns.shape[1:])
    # A draw of eight pixels at once is ten times as fast as draws of bytes.
    words = rng.integers(0, 2**64, math.ceil(math.prod(shape) / 8), np.uint64)
    images = words.view(np.uint8)[: math.prod(shape)].reshape(shape)
    images >>= 1
    for start in range(0, size, _CHUNK_IMAGES):
        chunk = slice(start, start + _CHUNK_IMAGES)
        images[chunk] += patterns[labels[chunk]]
    return Split({"image": images, "label": labels})


def require_facts(source: str) -> ImageFacts:
    """Return the sizes of a source, by its name. Raises ValueError if they aren't known."""
    facts = _find_facts(source)
    if facts is None:
        names = ", ".join(name for name in list_components("dataset") if _find_facts(name))
        raise ValueError(f"{source}: must be a source whose sizes are known: {names}")
    return facts


def _find_facts(source: str) -> ImageFacts | None:
    """Return the sizes of a source, by its name; None if they aren't known."""
    cls = list_components("dataset").get(source)
    return None if cls is None else find_class_facts(cast(type[DatasetSpec], cls))


def find_class_facts(cls: type[DatasetSpec]) -> ImageFacts | None:
    """Return the sizes that all datasets of a class have; None if they depend on its fields."""
    try:
        return cls.model_construct().facts()
    except AttributeError as error:  # `model_construct` sets no field.
        if error.name in cls.model_fields:
            return None
        raise


HEIGHTS = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
"""The templates of the digits 0 to 9, by point."""
SAMPLES, TRAIN_SAMPLES = 5_000, 4_000
SEED = 42
LEAST_PADDING, MOST_PADDING = 36, 60
"""Points of silence after a template, before it is stretched to `STRETCHED` points."""
STRETCHED = 12 + MOST_PADDING
LENGTH = 40
SCALE, SHEAR, MAX_SHIFT = 0.4, 0.75, 48
SMOOTH_NOISE, SMOOTH_SIGMA, WHITE_NOISE = 0.25, 2.0, 0.02
TINY = 1e-8
"""Added to the points of a template, so that none counts as silence."""


@component("dataset")
class Mnist1d(RootlessDatasetSpec):
    """4,000 training and 1,000 evaluation series of 40 steps in ten classes, made by a formula.

    They equal those of the package mnist1d with its defaults, up to the rounding of float32: the
    column `series`, float32 (40, 1).
    """

    content: ClassVar[str] = "series"
    origin: ClassVar[str] = "the series are made by a formula"
    name: Literal["mnist1d"] = "mnist1d"

    def read(self, cache: Path) -> RawData:
        """Return series, float32 (n, 40, 1), and labels, int32 (n,)."""
        series, labels = make_series()
        values = series.astype(np.float32)[..., np.newaxis]
        train, evaluated = (
            Split({"series": values[rows], "label": labels[rows]})
            for rows in (slice(TRAIN_SAMPLES), slice(TRAIN_SAMPLES, None))
        )
        return RawData(
            train,
            evaluated,
            Targets(tuple("0123456789")),
            unit=SampleUnit("series", "series", size=f"of {LENGTH} steps"),
            inputs=("series",),
        )


def make_series() -> tuple[np.ndarray, np.ndarray]:
    """Return all series, float64 (5000, 40), standardised as one, and their digits, int32 (5000,).

    Numpy's legacy generator draws them, in the order of the package mnist1d.
    """
    # Imported here, since it takes a while.
    from scipy.ndimage import gaussian_filter1d

    draw = np.random.RandomState(SEED)
    heights = np.array(HEIGHTS)
    heights = heights - heights.mean(axis=1, keepdims=True)
    heights /= heights.std(axis=1, keepdims=True)
    templates = (heights - heights[:, :1]) / 6
    digits = np.repeat(np.arange(len(templates)), SAMPLES // len(templates))
    series = np.empty((SAMPLES, STRETCHED))
    smooth, white = np.empty_like(series), np.empty_like(series)
    tilts = np.empty((SAMPLES, 1))
    for row, digit in enumerate(digits):
        padding = LEAST_PADDING + int(draw.rand() * (MOST_PADDING - LEAST_PADDING + 1))
        padded = np.concatenate([templates[digit] + TINY, np.zeros(padding)])
        stretched = _resample(padded, STRETCHED) * (1 + SCALE * (draw.rand() - 0.5))
        series[row] = np.roll(stretched, draw.choice(MAX_SHIFT))
        smooth[row] = draw.randn(STRETCHED)
        white[row] = draw.randn(STRETCHED)
        tilts[row] = SHEAR * (draw.rand() - 0.5)
    noise = gaussian_filter1d(SMOOTH_NOISE * smooth, SMOOTH_SIGMA, axis=1)
    series = np.where(series == 0, noise, series) + WHITE_NOISE * white
    series -= tilts * np.linspace(-0.5, 0.5, STRETCHED)
    series = np.stack([_resample(values, LENGTH) for values in series])
    order = draw.permutation(SAMPLES)
    series, labels = series[order], digits[order].astype(np.int32)
    return (series - series.mean()) / series.std(), labels


def _resample(values: np.ndarray, count: int) -> np.ndarray:
    """Return `count` values at even distances, by linear interpolation."""
    return np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(values)), values)
