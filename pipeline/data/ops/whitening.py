"""Whiten images: each gets mean 0 and variance 1 (D-19)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from pipeline.core.registry import part
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import Op
from pipeline.data.ops.image import image_shape


@part("op")
class Whiten(Op):
    """(image - m) / max(s, 1 / sqrt(n)) of its own n values, their mean m and deviation s.

    The bound keeps an image of one colour finite. It is what TensorFlow called
    `per_image_whitening` and now calls `per_image_standardization`: pixels stay correlated, which
    ZCA would change. Computed in float32; last digits depend on the device.
    """

    name: Literal["whiten"] = "whiten"

    def output(self, value: ColumnSpec) -> ColumnSpec:
        image_shape(value)
        return replace(value, dtype="float32")

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        values = values.astype(np.float32)
        count = float(np.prod(values.shape[1:]))
        centred = values - values.mean(axis=(1, 2, 3), keepdims=True)
        variance = (centred * centred).mean(axis=(1, 2, 3), keepdims=True)
        return centred / xp.maximum(xp.sqrt(variance), np.float32(count**-0.5))
