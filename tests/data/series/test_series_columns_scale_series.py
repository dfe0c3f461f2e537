"""Standardised series: statistics of each channel, without padding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.data.columns import ColumnSpec
from pipeline.data.series.series_columns import fit_scale


def test_channels_have_mean_0_and_deviation_1() -> None:
    values = np.random.default_rng(0).normal([5, -2], [3, 0.1], (20, 30, 2))
    values[3, 20:] = np.nan
    scale = fit_scale(values)
    for xp in (np, jnp):
        scaled = np.asarray(scale(xp, values.astype(np.float32), None), np.float64)
        np.testing.assert_allclose(np.nanmean(scaled, axis=(0, 1)), 0, atol=1e-5)
        np.testing.assert_allclose(np.nanstd(scaled, axis=(0, 1)), 1, rtol=1e-5)


def test_constant_channel_is_only_centred() -> None:
    scale = fit_scale(np.full((4, 3, 1), 0.1))
    assert scale.std == (1.0,)
    assert scale(np, np.float32([[[0.6]]]), None)[0, 0, 0] == pytest.approx(0.5)


def test_tiny_deviation_does_not_overflow() -> None:
    scale = fit_scale(np.array([[1e-40], [3e-40]]))
    assert np.isfinite(scale(np, np.float32([[[1.0]]]), None)).all()


def test_other_number_of_channels_is_refused() -> None:
    scale = fit_scale(np.ones((2, 3, 1)))
    with pytest.raises(ValueError, match=r"needs series of 1 channels, not \(3, 2\)"):
        scale.output(ColumnSpec((3, 2), "float32"))
