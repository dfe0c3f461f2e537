"""Map ops on series, float32 (steps, channels), and on sound (batch, samples)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from pipeline.core.registry import component
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import Op
from pipeline.data.random import scale_to_integers

MelScale = Literal["slaney", "htk"]
MAX_FFT = 2**16
"""The most samples of a frame."""
_LINEAR_HZ = 200 / 3
"""Width of a mel of Slaney's scale below `_LOG_START_HZ`."""
_LOG_START_HZ = 1000.0
_LOG_STEP = np.log(6.4) / 27
"""Logarithm of the ratio of two frequencies one mel apart in Slaney's scale, above 1,000 Hz."""


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


@component("op")
class LogMel(Op):
    """Log-mel spectrogram of sound, float32 (frames, mels, 1), which networks of images read.

    A frame has `fft_size` samples, each starts `hop` samples after the one before it. Its samples
    are multiplied by a Hann window. The power spectrum is weighted by `mels` triangular filters,
    evenly spaced on the mel scale between `low_hz` and `high_hz`, and its logarithm taken. Last
    digits depend on the device.
    """

    name: Literal["log_mel"] = "log_mel"
    column: str = "audio"
    rate_hz: PositiveInt
    """Samples a second of the sound."""
    fft_size: Annotated[int, Field(ge=2, le=MAX_FFT)]
    hop: PositiveInt
    window_size: PositiveInt | None = None
    """Samples of the window, in the middle of a frame; null: `fft_size`."""
    mels: PositiveInt
    low_hz: NonNegativeFloat = 0.0
    high_hz: PositiveFloat | None = None
    """null: half of `rate_hz`."""
    scale: MelScale = "slaney"
    """The mel scale: linear below 1,000 Hz (Slaney's Auditory Toolbox), or HTK's logarithm."""
    norm: Literal["slaney"] | None = "slaney"
    """slaney: all filters have the same area; null: the same peak, 1."""
    power: Literal[1, 2] = 2
    """The exponent of the spectrum's magnitudes."""
    log: Literal["db", "natural"] = "db"
    """db: 10 log10 of a power, or 20 log10 of a magnitude; natural: the natural logarithm."""
    floor: PositiveFloat = 1e-10
    """The least value whose logarithm is taken, so that silence has one."""
    center: bool = True
    """Whether frame t is around sample t * hop, with zeros before and after the sound; false: it
    starts there."""

    @model_validator(mode="after")
    def _require_filters(self) -> Self:
        if self.window_size is not None and self.window_size > self.fft_size:
            raise ValueError(
                f"window_size = {self.window_size}: must be at most fft_size = {self.fft_size}"
            )
        if self.hop > self.fft_size:
            raise ValueError(
                f"hop = {self.hop}: must be at most fft_size = {self.fft_size}, or samples "
                "between two frames would be left out"
            )
        if not self.low_hz < self.top_hz <= self.rate_hz / 2:
            raise ValueError(
                f"low_hz = {self.low_hz:g}, high_hz = {self.top_hz:g}: must be in this order, and "
                f"at most {self.rate_hz / 2:g}, half of rate_hz"
            )
        if self.mels > self.fft_size // 2 or not self.make_filters().any(axis=0).all():
            raise ValueError(
                f"mels = {self.mels}: some filters would lie between two of the "
                f"{self.fft_size // 2 + 1} frequencies of fft_size = {self.fft_size}; must be "
                "fewer, or fft_size larger"
            )
        return self

    @property
    def top_hz(self) -> float:
        """The highest frequency of a filter."""
        return self.rate_hz / 2 if self.high_hz is None else self.high_hz

    @property
    def padding(self) -> int:
        """The number of zeros before and after the sound."""
        return self.fft_size // 2 if self.center else 0

    @property
    def log_factor(self) -> float:
        """Factor on natural logarithms."""
        return 1.0 if self.log == "natural" else 20 / self.power / float(np.log(10))

    def output(self, value: ColumnSpec) -> ColumnSpec:
        if len(value.shape) != 1 or not np.issubdtype(np.dtype(value.dtype), np.floating):
            raise ValueError(
                f"needs sound, floats of shape (samples,), not {value.dtype} of shape {value.shape}"
            )
        frames = self.count_frames(value.shape[0])
        if frames < 1:
            raise ValueError(
                f"sound of {value.shape[0]:,} samples has no frame of fft_size = {self.fft_size:,}"
            )
        return replace(value, shape=(frames, self.mels, 1), dtype="float32")

    def count_frames(self, samples: int) -> int:
        """Return the number of frames of sound of this length."""
        return 1 + (samples + 2 * self.padding - self.fft_size) // self.hop

    def list_indices(self, samples: int) -> np.ndarray:
        """Return the samples of each frame in padded sound, int32 (frames, fft_size)."""
        starts = np.arange(self.count_frames(samples), dtype=np.int32) * self.hop
        return starts[:, None] + np.arange(self.fft_size, dtype=np.int32)

    def make_filters(self) -> np.ndarray:
        """Return the weights of frequencies in mels, float32 (fft_size // 2 + 1, mels)."""
        bounds_hz = (self.low_hz, self.top_hz)
        return make_mel_filters(
            self.rate_hz, self.fft_size, self.mels, bounds_hz, self.scale, self.norm == "slaney"
        )

    def make_window(self) -> np.ndarray:
        """Return the periodic Hann window, float32 (fft_size,), with zeros around it."""
        size = self.window_size or self.fft_size
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
        before = (self.fft_size - size) // 2
        padded = np.pad(hann, (before, self.fft_size - size - before))
        return padded.astype(np.float32)

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        sound = xp.pad(values.astype(np.float32), ((0, 0), (self.padding, self.padding)))
        # All indices are in range; "clip" avoids numpy's check.
        frames = xp.take(sound, self.list_indices(values.shape[1]), axis=1, mode="clip")
        spectrum = xp.fft.rfft(frames * self.make_window(), axis=-1)
        strength = spectrum.real * spectrum.real + spectrum.imag * spectrum.imag
        if self.power == 1:
            strength = xp.sqrt(strength)
        precision = {} if xp is np else {"precision": "highest"}
        mels = xp.matmul(strength, self.make_filters(), **precision)
        logs = xp.log(xp.maximum(mels, np.float32(self.floor))) * np.float32(self.log_factor)
        return logs.astype(np.float32)[..., None]


@lru_cache(maxsize=8)
def make_mel_filters(
    rate_hz: int,
    fft_size: int,
    mels: int,
    bounds_hz: tuple[float, float],
    scale: MelScale,
    equal_areas: bool,
) -> np.ndarray:
    """Return triangular filters, float32 (fft_size // 2 + 1, mels), whose corners are evenly spaced
    on a mel scale. They have the same area, or the peak 1."""
    low, high = (convert_to_mels(hz, scale) for hz in bounds_hz)
    corners_hz = convert_to_hz(np.linspace(low, high, mels + 2), scale)
    left, peak, right = corners_hz[:-2], corners_hz[1:-1], corners_hz[2:]
    bins_hz = np.arange(fft_size // 2 + 1)[:, None] * (rate_hz / fft_size)
    rising = (bins_hz - left) / (peak - left)
    falling = (right - bins_hz) / (right - peak)
    filters = np.minimum(rising, falling).clip(min=0)
    if equal_areas:
        filters *= 2 / (right - left)
    filters = filters.astype(np.float32)
    filters.flags.writeable = False
    return filters


def convert_to_mels(hz: float, scale: MelScale) -> float:
    """Return a frequency in mels: 2595 log10(1 + hz / 700) (HTK), or that of Slaney's Auditory
    Toolbox (1998), linear below 1,000 Hz and logarithmic above."""
    if scale == "htk":
        return float(2595 * np.log10(1 + hz / 700))
    if hz < _LOG_START_HZ:
        return hz / _LINEAR_HZ
    return float(_LOG_START_HZ / _LINEAR_HZ + np.log(hz / _LOG_START_HZ) / _LOG_STEP)


def convert_to_hz(mels: np.ndarray, scale: MelScale) -> np.ndarray:
    """Return frequencies of mels, the inverse of `convert_to_mels`."""
    if scale == "htk":
        return np.asarray(700 * (10 ** (mels / 2595) - 1))
    log_start = _LOG_START_HZ / _LINEAR_HZ
    above = _LOG_START_HZ * np.exp(_LOG_STEP * np.maximum(mels - log_start, 0))
    return np.where(mels < log_start, mels * _LINEAR_HZ, above)
