"""Twins by shape: made-up images with the sizes of another source, so that no data is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import PositiveInt, ValidationError, field_validator

from pipeline.data.columns import Facts, RawData, Split
from pipeline.data.spec import DatasetSpec
from pipeline.registry import part, parts

_SEED = 20_200_328
_PATTERN_CELLS = 4
_UNREAD = {
    "root": None,
    "mirrors": (),
    "train": {
        "ops": (),
        "shuffle": True,
        "buffer_size": None,
        "drop_remainder": True,
        "repeat": 1,
    },
    "eval": {"ops": (), "batch_size": None},
}


@part("dataset")
class Synthetic(DatasetSpec):
    """Images of another source's sizes: a pattern per class under noise, so a network can learn.

    `dataset.name=synthetic +dataset.like=mnist` turns any dataset section into its twin and keeps
    its ops; root and mirrors are left unused for that.
    """

    name: Literal["synthetic"] = "synthetic"
    like: str
    """The source whose sizes to take."""
    train_size: PositiveInt | None = None
    eval_size: PositiveInt | None = None
    """null takes as many as the twin has."""

    @field_validator("like")
    @classmethod
    def _has_known_sizes(cls, like: str) -> str:
        if _facts_of(like) is None:
            known = ", ".join(name for name in parts("dataset") if _facts_of(name))
            raise ValueError(f"{like}: must be a source whose sizes are known: {known}")
        return like

    def facts(self) -> Facts:
        """The twin's sizes, or those given."""
        twin = _facts_of(self.like)
        if twin is None:
            raise ValueError(f"{self.like}: its sizes are not known")
        return replace(
            twin,
            train_size=self.train_size or twin.train_size,
            eval_size=self.eval_size or twin.eval_size,
        )

    def read(self, cache: Path) -> RawData:
        """Images uint8 (n, H, W, C), labels int32 (n,); the same ones every time."""
        sizes = self.facts()
        patterns = draw_patterns(sizes.classes, sizes.image)
        return RawData(
            train=draw_split(patterns, sizes.train_size, seed=_SEED + 1),
            eval=draw_split(patterns, sizes.eval_size, seed=_SEED + 2),
            classes=tuple(str(label) for label in range(sizes.classes)),
        )


def draw_patterns(classes: int, image: tuple[int, int, int]) -> np.ndarray:
    """One image of 4x4 random flat cells per class, uint8 (classes, H, W, C), values 0 to 127."""
    height, width, channels = image
    shape = (classes, _PATTERN_CELLS, _PATTERN_CELLS, channels)
    cells = np.random.default_rng(_SEED).integers(0, 128, shape, np.uint8)
    rows = np.arange(height) * _PATTERN_CELLS // height
    columns = np.arange(width) * _PATTERN_CELLS // width
    return cells[:, rows[:, np.newaxis], columns]


def draw_split(patterns: np.ndarray, size: int, seed: int) -> Split:
    """`size` samples with classes as even as can be: the class's pattern plus noise of 0 to 127."""
    rng = np.random.default_rng(seed)
    labels = (rng.permutation(size) % len(patterns)).astype(np.int32)
    shape = (size, *patterns.shape[1:])
    # Eight pixels per draw: ten times as fast as drawing bytes.
    words = rng.integers(0, 2**64, -(-int(np.prod(shape)) // 8), np.uint64)
    images = words.view(np.uint8)[: np.prod(shape)].reshape(shape)
    images >>= 1
    images += patterns[labels]
    return Split({"image": images, "label": labels})


def _facts_of(name: str) -> Facts | None:
    """The sizes of a source, None where there is no such source or only its files tell."""
    source = parts("dataset").get(name)
    try:
        unread = source.model_validate(_UNREAD) if source else None
    except ValidationError:
        return None
    return unread.facts() if isinstance(unread, DatasetSpec) else None
