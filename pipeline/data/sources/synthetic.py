"""Synthetic images with the sizes of another source, which need no data."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import PositiveInt, field_validator

from pipeline.core.host.memory import require_room
from pipeline.core.registry import part, parts
from pipeline.data.columns import Facts, RawData, Split
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import name_file
from pipeline.data.targets import Targets

_PATTERN_SEED = 0
_TRAIN_SEED = 1
_EVAL_SEED = 2
_PATTERN_CELLS = 4


@part("dataset")
class Synthetic(DatasetSpec):
    """Images of another source's sizes: a pattern per class under noise, so a network can learn.

    `dataset.name=synthetic +dataset.like=mnist` changes any dataset section into its twin and keeps
    its ops. Root and mirrors are left unused for that.
    """

    name: Literal["synthetic"] = "synthetic"
    like: str
    """The source whose sizes to take."""
    train_size: PositiveInt | None = None
    eval_size: PositiveInt | None = None
    """null: the sizes of the twin."""

    @field_validator("like")
    @classmethod
    def _has_known_sizes(cls, like: str) -> str:
        facts_of(like)
        return like

    def facts(self) -> Facts:
        """The twin's sizes, or the recipe's."""
        twin = facts_of(self.like)
        return replace(
            twin,
            train_size=self.train_size or twin.train_size,
            eval_size=self.eval_size or twin.eval_size,
        )

    def read(self, cache: Path) -> RawData:
        """Images uint8 (n, H, W, C), labels int32 (n,); the same ones every time."""
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
    """One image of 4x4 random flat cells per class, uint8 (classes, H, W, C), values 0 to 127."""
    height, width, channels = image
    shape = (classes, _PATTERN_CELLS, _PATTERN_CELLS, channels)
    cells = np.random.default_rng(_PATTERN_SEED).integers(0, 128, shape, np.uint8)
    rows = np.arange(height) * _PATTERN_CELLS // height
    columns = np.arange(width) * _PATTERN_CELLS // width
    return cells[:, rows[:, np.newaxis], columns]


def draw_split(patterns: np.ndarray, size: int, seed: int) -> Split:
    """`size` samples with classes as even as can be: the class's pattern plus noise of 0 to 127."""
    rng = np.random.default_rng(seed)
    labels = (rng.permutation(size) % len(patterns)).astype(np.int32)
    shape = (size, *patterns.shape[1:])
    # Eight pixels per draw: ten times as fast as drawing bytes.
    words = rng.integers(0, 2**64, math.ceil(math.prod(shape) / 8), np.uint64)
    images = words.view(np.uint8)[: math.prod(shape)].reshape(shape)
    images >>= 1
    images += patterns[labels]
    return Split({"image": images, "label": labels})


def facts_of(source: str) -> Facts:
    """The sizes of a source by name. Raises ValueError if only its files have them."""
    facts = _find_facts(source)
    if facts is None:
        names = ", ".join(name for name in parts("dataset") if _find_facts(name))
        raise ValueError(f"{source}: must be a source whose sizes are known: {names}")
    return facts


def _find_facts(source: str) -> Facts | None:
    cls = parts("dataset").get(source)
    unread = cls.model_construct() if cls else None
    try:
        return unread.facts() if isinstance(unread, DatasetSpec) else None
    except AttributeError:  # its sizes are fields of the recipe
        return None
