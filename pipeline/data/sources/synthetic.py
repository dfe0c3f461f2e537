"""Random images with the sizes of another source. They need no download."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import numpy as np
from pydantic import PositiveInt, field_validator

from pipeline.core.host.memory import require_room
from pipeline.core.registry import component, list_components
from pipeline.data.columns import RawData, Split
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import name_file
from pipeline.data.image_facts import ImageFacts
from pipeline.data.targets import Targets

_PATTERN_SEED = 0
_TRAIN_SEED = 1
_EVAL_SEED = 2
_PATTERN_CELLS = 4
"""Cells of a pattern along each side of an image."""


@component("dataset")
class Synthetic(DatasetSpec):
    """Images with the sizes of another source. An image is the pattern of its class plus noise, so
    that a network can learn the classes.

    `dataset.name=synthetic +dataset.like=mnist` replaces the source of a recipe and keeps its ops.
    `root` and `mirrors` are ignored.
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
    images += patterns[labels]
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
    if cls is None:
        return None
    try:
        return cast(DatasetSpec, cls.model_construct()).facts()
    except AttributeError:  # The sizes depend on fields, and `model_construct` sets none.
        return None
