"""Sizes of image datasets that are known before they are read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.data.columns import BlankColumn, ColumnSpec, RawData, Split, Targets


@dataclass(frozen=True)
class ImageFacts:
    """Sizes of a dataset of images that are known before reading it."""

    image: tuple[int, int, int]
    """(height, width, channels)."""
    classes: int
    train_size: int
    eval_size: int

    def specs(self) -> dict[str, ColumnSpec]:
        """Return the shape and dtype of one value, by column."""
        return {"image": ColumnSpec(self.image, "uint8"), "label": ColumnSpec((), "int32")}


def make_blank_data(sizes: ImageFacts, class_names: tuple[str, ...]) -> RawData:
    """Make splits of zeros: images, uint8 (n, height, width, channels), and labels, int32 (n,)."""

    def make_split(samples: int) -> Split:
        image = BlankColumn((samples, *sizes.image), np.dtype(np.uint8))
        return Split({"image": image, "label": BlankColumn((samples,), np.dtype(np.int32))})

    train = make_split(sizes.train_size)
    return RawData(train, make_split(sizes.eval_size), Targets(class_names))
