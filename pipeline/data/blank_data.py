"""Data of known sizes without its samples, for stages that read none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.data.columns import Facts, RawData, Split
from pipeline.data.targets import Targets


@dataclass(frozen=True)
class BlankColumn:
    """Column of zeros in place of samples that aren't there; they take no memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, indices: Any) -> np.ndarray:
        """Zeros in the shape of the values at `indices`."""
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)[indices]


def blank_data(sizes: Facts, class_names: tuple[str, ...]) -> RawData:
    """Blank images, uint8 (n, height, width, channels), and labels, int32 (n,), of both splits."""
    return RawData(
        train=_blank_split(sizes, sizes.train_size),
        eval=_blank_split(sizes, sizes.eval_size),
        targets=Targets(class_names),
    )


def _blank_split(sizes: Facts, samples: int) -> Split:
    image = BlankColumn((samples, *sizes.image), np.dtype(np.uint8))
    return Split({"image": image, "label": BlankColumn((samples,), np.dtype(np.int32))})
