"""MNIST-1D: short series in the shapes of ten digits, made by a formula (Greydanus 2020).

S. Greydanus and D. Kobak, Scaling down deep learning with MNIST-1D, arXiv 2011.14439. A digit is a
template of 12 points. It is padded, stretched, scaled and moved, its silence becomes smooth noise,
and it is tilted and sampled at 40 points.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import field_validator

from pipeline.core.registry import component
from pipeline.data.columns import RawData, SampleUnit, Split
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.targets import Targets

HEIGHTS = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
"""The templates of the digits 0 to 9, by point."""
SAMPLES, TRAIN_SAMPLES = 5_000, 4_000
SEED = 42
LEAST_PADDING, MOST_PADDING = 36, 60
"""Points of silence after a template, before it is stretched to `STRETCHED` points."""
STRETCHED = 12 + MOST_PADDING
LENGTH = 40
SCALE, SHEAR, MAX_SHIFT = 0.4, 0.75, 48
SMOOTH_NOISE, SMOOTH_SIGMA, WHITE_NOISE = 0.25, 2.0, 0.02
TINY = 1e-8
"""Added to the points of a template, so that none counts as silence."""


@component("dataset")
class Mnist1d(DatasetSpec):
    """4,000 training and 1,000 evaluation series of 40 steps in ten classes, made by a formula.

    They equal those of the package mnist1d with its defaults, up to the rounding of float32: the
    column `series`, float32 (40, 1).
    """

    content: ClassVar[str] = "series"
    name: Literal["mnist1d"] = "mnist1d"

    @field_validator("root")
    @classmethod
    def _require_no_root(cls, root: Path | None) -> Path | None:
        if root is not None:
            raise ValueError(f"{root}: must be null; the series are made by a formula")
        return root

    def read(self, cache: Path) -> RawData:
        """Return series, float32 (n, 40, 1), and labels, int32 (n,)."""
        series, labels = make_series()
        values = series.astype(np.float32)[..., np.newaxis]
        train, evaluated = (
            Split({"series": values[rows], "label": labels[rows]})
            for rows in (slice(TRAIN_SAMPLES), slice(TRAIN_SAMPLES, None))
        )
        return RawData(
            train,
            evaluated,
            Targets(tuple("0123456789")),
            unit=SampleUnit("series", "series", size=f"of {LENGTH} steps"),
            inputs=("series",),
        )


def make_series() -> tuple[np.ndarray, np.ndarray]:
    """Return all series, float64 (5000, 40), standardised as one, and their digits, int32 (5000,).

    Numpy's legacy generator draws them, in the order of the package mnist1d.
    """
    # Imported here, since it takes a while.
    from scipy.ndimage import gaussian_filter1d

    draw = np.random.RandomState(SEED)
    heights = np.array(HEIGHTS)
    heights = heights - heights.mean(axis=1, keepdims=True)
    heights /= heights.std(axis=1, keepdims=True)
    templates = (heights - heights[:, :1]) / 6
    digits = np.repeat(np.arange(len(templates)), SAMPLES // len(templates))
    series = np.empty((SAMPLES, STRETCHED))
    smooth, white = np.empty_like(series), np.empty_like(series)
    tilts = np.empty((SAMPLES, 1))
    for row, digit in enumerate(digits):
        padding = LEAST_PADDING + int(draw.rand() * (MOST_PADDING - LEAST_PADDING + 1))
        padded = np.concatenate([templates[digit] + TINY, np.zeros(padding)])
        stretched = _resample(padded, STRETCHED) * (1 + SCALE * (draw.rand() - 0.5))
        series[row] = np.roll(stretched, draw.choice(MAX_SHIFT))
        smooth[row] = draw.randn(STRETCHED)
        white[row] = draw.randn(STRETCHED)
        tilts[row] = SHEAR * (draw.rand() - 0.5)
    noise = gaussian_filter1d(SMOOTH_NOISE * smooth, SMOOTH_SIGMA, axis=1)
    series = np.where(series == 0, noise, series) + WHITE_NOISE * white
    series -= tilts * np.linspace(-0.5, 0.5, STRETCHED)
    series = np.stack([_resample(values, LENGTH) for values in series])
    order = draw.permutation(SAMPLES)
    series, labels = series[order], digits[order].astype(np.int32)
    return (series - series.mean()) / series.std(), labels


def _resample(values: np.ndarray, count: int) -> np.ndarray:
    """Return `count` values at even distances, by linear interpolation."""
    return np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(values)), values)
