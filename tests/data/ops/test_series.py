"""Ops on series, against hand-worked numbers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.series import RandomRoll


def test_roll_moves_each_series_by_its_own_draw() -> None:
    values = np.arange(2 * 5 * 2, dtype=np.float32).reshape(2, 5, 2)
    uniforms = np.array([[0.0], [0.99]], np.float32)
    for xp in (np, jnp):
        rolled = np.asarray(RandomRoll(steps=2)(xp, xp.asarray(values), xp.asarray(uniforms)))
        expected = [np.roll(values[0], -2, axis=0), np.roll(values[1], 2, axis=0)]
        np.testing.assert_array_equal(rolled, np.stack(expected))


def test_all_shifts_are_drawn_equally_often() -> None:
    values = np.tile(np.eye(7, dtype=np.float32)[3][:, None], (5000, 1, 1))
    uniforms = np.arange(5000, dtype=np.float32)[:, None] / 5000
    rolled = RandomRoll(steps=2)(np, values, uniforms)
    assert rolled.sum(axis=0).ravel().tolist() == [0, 1000, 1000, 1000, 1000, 1000, 0]


def test_values_that_cannot_be_rolled_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs series \(steps, channels\), not values of shape"):
        RandomRoll(steps=2).output(ColumnSpec((8, 8, 1), "uint8"))
    with pytest.raises(ValueError, match="steps = 5: must be less than the 5 steps of a series"):
        RandomRoll(steps=5).output(ColumnSpec((5, 1), "float32"))
