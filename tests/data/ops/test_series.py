"""Ops on series, against hand-worked numbers.

Log-mel spectrograms against librosa's, on the host and in a compiled program.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.series import LogMel, RandomRoll

SMALL: dict[str, Any] = {"rate_hz": 8000, "fft_size": 256, "hop": 80, "mels": 40}


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


with np.load(Path(__file__).parents[2] / "golden/log_mel.npz") as stored:
    GOLDEN = dict(stored)
SOUND = GOLDEN["sound"]
CASES = [key for key in GOLDEN if key != "sound"]


@pytest.mark.parametrize("case", CASES)
def test_golden_spectrograms_of_librosa(case: str) -> None:
    op = LogMel(rate_hz=8000, **json.loads(case))
    found = op(np, SOUND, None)
    assert (found.shape[1:], found.dtype) == (op.output(spec_of(SOUND)).shape, np.float32)
    np.testing.assert_allclose(found[..., 0], GOLDEN[case], atol=5e-5)


@pytest.mark.medium
@pytest.mark.parametrize("case", CASES)
def test_golden_spectrograms_in_a_compiled_program(case: str) -> None:
    op = LogMel(rate_hz=8000, **json.loads(case))
    found = jax.jit(lambda sound: op(jnp, sound, None))(SOUND)
    np.testing.assert_allclose(np.asarray(found)[..., 0], GOLDEN[case], atol=5e-5)


def test_frames_cover_the_sound() -> None:
    """A click at sample t is in the frames around it alone."""
    sound = np.zeros((1, 1000), np.float32)
    sound[0, 500] = 1
    op = LogMel(**{**SMALL, "fft_size": 128, "mels": 20, "hop": 50, "floor": 1e-8})
    loud = np.flatnonzero((op(np, sound, None)[0, :, :, 0] > -79).any(axis=1))
    assert loud.tolist() == [9, 10, 11]
    at_start = op.model_copy(update={"center": False})
    loud = np.flatnonzero((at_start(np, sound, None)[0, :, :, 0] > -79).any(axis=1))
    assert loud.tolist() == [8, 9]  # sample 500 has the window's weight 0 in frame 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": 300}, "window_size = 300: must be at most fft_size = 256"),
        ({"hop": 257}, "hop = 257: must be at most fft_size = 256, or samples between two frames"),
        ({"high_hz": 4001.0}, "high_hz = 4001: must be in this order, and at most 4000, half of"),
        ({"low_hz": 900.0, "high_hz": 800.0}, "low_hz = 900, high_hz = 800: must be in this order"),
        ({"mels": 128, "low_hz": 3000.0}, "some filters would lie between two of the 129 freq"),
        ({"mels": 10**9}, "some filters would lie between two of the 129 frequencies of fft_size"),
        ({"floor": 0.0}, "greater than 0"),
    ],
)
def test_impossible_filters_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LogMel(**{**SMALL, **changes})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ColumnSpec((28, 28, 1), "uint8"), r"needs sound, floats of shape \(samples,\), not uint8"),
        (ColumnSpec((128,), "int32"), r"needs sound, floats of shape \(samples,\), not int32"),
        (ColumnSpec((800, 2), "float32"), r"not float32 of shape \(800, 2\)"),
    ],
)
def test_columns_of_other_types_are_refused(spec: ColumnSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogMel(**SMALL).output(spec)


def test_sound_shorter_than_a_frame_is_refused() -> None:
    op = LogMel(**SMALL, center=False)
    assert op.output(ColumnSpec((256,), "float32")).shape == (1, 40, 1)
    with pytest.raises(ValueError, match="sound of 255 samples has no frame of fft_size = 256"):
        op.output(ColumnSpec((255,), "float32"))


def spec_of(values: np.ndarray) -> ColumnSpec:
    return ColumnSpec(values.shape[1:], values.dtype.name)
