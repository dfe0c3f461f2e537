"""UCI optical digits, which are shipped with the package: a first run needs no download."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import field_validator

from pipeline.core.registry import component
from pipeline.data.columns import RawData, Split
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.image_facts import ImageFacts
from pipeline.data.targets import Targets

_ARRAYS = Path(__file__).with_name("digits.npz")


@component("dataset")
class Digits(DatasetSpec):
    """1,797 handwritten digits, 8x8 pixels from 0 to 16. Every fifth digit is for evaluation.

    Source and licence are in `digits.txt` beside the data.
    """

    brightest: ClassVar[int] = 16
    name: Literal["digits"] = "digits"

    @field_validator("root")
    @classmethod
    def _require_no_root(cls, root: Path | None) -> Path | None:
        if root is not None:
            raise ValueError(f"{root}: must be null; the digits are shipped with this package")
        return root

    def facts(self) -> ImageFacts:
        return ImageFacts(image=(8, 8, 1), classes=10, train_size=1_438, eval_size=359)

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
