"""UCI optical digits, which are shipped with the package: a first run needs no download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from pipeline.core.registry import component
from pipeline.data.columns import Column, RawData, Split, Targets
from pipeline.data.dataset_roots import RootlessDatasetSpec
from pipeline.data.image_facts import ImageFacts

_ARRAYS = Path(__file__).with_name("digits.npz")


class _ShippedDigits(RootlessDatasetSpec):
    """Base of the datasets of the digits that ship."""

    brightest: ClassVar[int] = 16
    origin: ClassVar[str] = "the digits are shipped with this package"

    def read(self, cache: Path) -> RawData:
        """Return images, uint8 (n, 8, 8, 1), and labels, int32 (n,)."""
        with np.load(_ARRAYS, allow_pickle=False) as arrays:
            images = arrays["image"][..., np.newaxis]
            labels = arrays["label"].astype(np.int32)
        is_eval = np.arange(len(labels)) % 5 == 4
        return RawData(
            train=Split({"image": images[~is_eval], "label": labels[~is_eval]}),
            eval=Split({"image": images[is_eval], "label": labels[is_eval]}),
            targets=Targets(tuple("0123456789")),
        )


@component("dataset")
class Digits(_ShippedDigits):
    """1,797 handwritten digits, 8x8 pixels from 0 to 16. Every fifth digit is for evaluation.

    Source and licence are in `digits.txt` beside the data.
    """

    name: Literal["digits"] = "digits"

    def facts(self) -> ImageFacts:
        return ImageFacts(image=(8, 8, 1), classes=10, train_size=1_438, eval_size=359)


@component("dataset")
class DigitHalves(_ShippedDigits):
    """The digits of `dataset=digits` as an image with a row of numbers: for networks of two inputs.

    `image` is the upper half of a digit, uint8 (4, 8, 1). `features`, float32 (4,), are the sums of
    the pixels in each row of its lower half, from 0 to 128.
    """

    name: Literal["digit_halves"] = "digit_halves"

    def read(self, cache: Path) -> RawData:
        """Return images, uint8 (n, 4, 8, 1), features, float32 (n, 4), and labels, int32 (n,)."""
        raw = super().read(cache)
        return replace(raw, train=_halve(raw.train.columns), eval=_halve(raw.eval.columns))


def _halve(columns: Mapping[str, Column]) -> Split:
    """Return digits with the upper half as the image, and sums of the lower half's rows beside."""
    images = np.asarray(columns["image"][:])
    sums = images[:, 4:].sum(axis=(2, 3)).astype(np.float32)
    return Split({"image": images[:, :4], "features": sums, "label": columns["label"]})
