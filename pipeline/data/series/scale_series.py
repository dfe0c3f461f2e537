"""The op that standardises series by the training split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import PositiveFloat

from pipeline.core.registry import Seq
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import Op


class ScaleSeries(Op):
    """(series - mean) / std in float32, with a mean and a std for each channel.

    Both are of the training split and saved with the run, so that a trained network reads series in
    the units of the data.
    """

    name: Literal["scale_series"] = "scale_series"
    column: str = "series"
    mean: Seq[float]
    std: Seq[PositiveFloat]

    def output(self, value: ColumnSpec) -> ColumnSpec:
        if len(value.shape) != 2 or value.shape[1] != len(self.mean):
            raise ValueError(f"needs series of {len(self.mean)} channels, not {value.shape}")
        return replace(value, dtype="float32")

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        mean = np.array(self.mean, np.float32)
        std = np.array(self.std, np.float32)
        # XLA replaces division by a constant with this product, but numpy doesn't.
        return (values.astype(np.float32) - mean) * (1 / std)


def fit_scale(values: np.ndarray) -> ScaleSeries:
    """Return the op for the training values, (..., channels), without those that are NaN. A channel
    whose values are all equal is only centred."""
    flat = np.asarray(values, np.float64).reshape(-1, values.shape[-1])
    mean = np.nanmean(flat, axis=0)
    std = np.nanstd(flat, axis=0)
    # The computed deviation of equal numbers such as 0.1 isn't always 0.
    is_constant = np.nanmax(flat, axis=0) == np.nanmin(flat, axis=0)
    # A float32 has no inverse of a smaller deviation.
    std[is_constant | (std < np.finfo(np.float32).tiny)] = 1.0
    return ScaleSeries(mean=tuple(mean.tolist()), std=tuple(std.tolist()))
