"""Map ops on series, float32 (steps, channels)."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import PositiveInt

from pipeline.core.registry import component
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import Op
from pipeline.data.random import scale_to_integers


@component("op")
class RandomRoll(Op):
    """Move a series by a drawn number of steps, from -`steps` to `steps`. What leaves it at one end
    comes back at the other."""

    name: Literal["random_roll"] = "random_roll"
    column: str = "series"
    steps: PositiveInt

    @property
    def draws(self) -> int:
        return 1

    def output(self, value: ColumnSpec) -> ColumnSpec:
        if len(value.shape) != 2:
            raise ValueError(f"needs series (steps, channels), not values of shape {value.shape}")
        if self.steps >= value.shape[0]:
            raise ValueError(
                f"steps = {self.steps}: must be less than the {value.shape[0]} steps of a series"
            )
        return value

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        shifts = scale_to_integers(xp, uniforms[:, 0], 2 * self.steps + 1) - self.steps
        length = values.shape[1]
        sources = (np.arange(length, dtype=np.int32) - shifts[:, None]) % length
        return xp.take_along_axis(values, sources[:, :, None], axis=1)
