"""Learning-rate schedules of several phases: restarts, waves, a cooldown, one cycle, and one rate
for each update from a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.npy import parse_npy
from pipeline.core.files.value_text import show
from pipeline.core.registry import MAX_FLOAT, FilePath, component
from pipeline.training.component_specs import ScheduleSpec
from pipeline.training.schedules import DecaySpan, Share, WarmupDecay


@component("schedule")
class CosineRestarts(WarmupDecay):
    """Cosine decay that begins again after each period (SGDR, 1608.03983): at update t of a period
    of n, lr * (e + (1 - e) * (1 + cos(pi * t / n)) / 2) with e = end_factor. Each period is
    `growth` times the one before. PyTorch's CosineAnnealingWarmRestarts."""

    name: Literal["cosine_restarts"] = "cosine_restarts"
    period_steps: NonNegativeInt = 0
    period_epochs: NonNegativeFloat = 1.0
    """The first period in epochs, in place of `period_steps`; rounded to whole steps."""
    growth: PositiveInt = 1
    end_factor: Share = 0.0

    @model_validator(mode="after")
    def _require_one_length(self) -> Self:
        if bool(self.period_steps) == bool(self.period_epochs):
            raise ValueError(
                f"period_steps = {self.period_steps} and period_epochs = {self.period_epochs}: "
                "exactly one must be above 0"
            )
        return self

    def decay(self, span: DecaySpan) -> np.ndarray:
        length = self.period_steps or max(1, round(self.period_epochs * span.steps_per_epoch))
        waves = []
        num_left = span.stop - span.start
        while num_left > 0:
            steps = np.arange(min(length, num_left))
            waves.append(0.5 * (1 + np.cos(np.pi * steps / length)))
            num_left -= length
            length *= self.growth
        return self.end_factor + (1 - self.end_factor) * np.concatenate(waves)


@component("schedule")
class WarmupStableDecay(WarmupDecay):
    """The full learning rate after warmup, then a cooldown over the last updates (MiniCPM,
    2404.06395).

    The cooldown has round(cooldown_share * T) of the T updates. At the share s of it the rate is
    lr * (e + (1 - e) * (1 - s)) with e = end_factor. With `shape: sqrt`, 1 - s is 1 - sqrt(s), the
    best in 2405.18392. The rate is lr * e one update after the last.
    """

    name: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    cooldown_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    shape: Literal["linear", "sqrt"] = "sqrt"
    end_factor: Share = 0.0

    def decay(self, span: DecaySpan) -> np.ndarray:
        length = min(max(1, round(self.cooldown_share * span.stop)), span.stop - span.start)
        step = span.start + span.elapsed_updates
        share = np.maximum(step - (span.stop - length), 0) / length
        fall = np.sqrt(share) if self.shape == "sqrt" else share
        return self.end_factor + (1 - self.end_factor) * (1 - fall)


@component("schedule")
class OneCycle(ScheduleSpec):
    """One rise and one fall over the whole run (Smith & Topin, 1708.07120), as in PyTorch's
    OneCycleLR.

    With T updates, the rate is lr * start_factor at update 0, lr at update rise_share * T - 1, and
    lr * end_factor at update T - 1. In between it follows half a cosine, or a line.
    """

    name: Literal["one_cycle"] = "one_cycle"
    rise_share: Share = 0.3
    start_factor: Share = 0.04
    end_factor: Share = 4e-6
    shape: Literal["cosine", "linear"] = "cosine"

    def table(self, lr: float, steps: int, steps_per_epoch: int) -> np.ndarray:
        """Return the learning rate of each of `steps` updates, float32."""
        step = np.arange(steps)
        peak, last = self.rise_share * steps - 1, steps - 1
        rise = np.clip(step / peak, 0, 1) if peak > 0 else np.ones(steps)
        fall = np.clip((step - peak) / ((last - peak) or 1), 0, 1)
        if self.shape == "cosine":
            rise, fall = (0.5 * (1 - np.cos(np.pi * share)) for share in (rise, fall))
        rising = self.start_factor + (1 - self.start_factor) * rise
        falling = 1 + (self.end_factor - 1) * fall
        factors = np.where(step <= peak, rising, falling)
        return (lr * factors).astype(np.float32)


@component("schedule")
class CosineLog(WarmupDecay):
    """lr * (1 - cos(2 pi log2(1 + (2^n - 1) s))) / 2 at the share s of the updates: n waves, each
    twice as long as the one before, from 0 to lr and back (RealMLP's coslog4, 2407.04491)."""

    name: Literal["cosine_log"] = "cosine_log"
    waves: Annotated[int, Field(ge=1, le=64)] = 4

    def decay(self, span: DecaySpan) -> np.ndarray:
        phase = np.log2(1 + (2.0**self.waves - 1) * span.progress)
        return 0.5 * (1 - np.cos(2 * np.pi * phase))


MAX_BYTES = 64 * 2**20
"""Size limit of a file: 16 million rates in float32."""
FLOATS = ("float16", "float32", "float64")
"""Dtypes that a .npy file may have."""


@dataclass(frozen=True)
class RateFile:
    """The rates of a file, their dtype and the file's checksum."""

    rates: np.ndarray
    """Rate of each update, float64 (updates,), finite and not negative."""
    dtype: str
    """Dtype of the numbers in the file; `text` for a text file."""
    sha256: str
    """SHA-256 of the file's bytes, in hexadecimal."""


@component("schedule")
class TableSchedule(ScheduleSpec):
    """The learning rates in a file: row i is the rate of update i, as in MindSpore.

    The rates aren't multiplied by `train.optimizer.lr`. A file may have more rows than training has
    updates. With fewer rows, the run ends before compilation; in MindSpore 2.10 it ends in the
    middle of training.
    """

    name: Literal["table"] = "table"
    file: FilePath | None = None
    """A `.npy` file, floats (updates,), or a text, `.csv` or `.txt`, with one number per line.
    Empty lines and lines that begin with # are ignored."""

    @model_validator(mode="after")
    def _require_file(self) -> Self:
        if self.file is None:
            raise ValueError(f"file = null: must be a file that ends in {', '.join(_READERS)}")
        return self

    def read(self) -> RateFile:
        """Read the file. Raises ValueError with its name and the problem."""
        assert self.file is not None, "_require_file checked it"
        try:
            read = _READERS.get(self.file.suffix)
            if read is None:
                raise ValueError(f"must end in {', '.join(_READERS)}")
            content = read_bytes(self.file, MAX_BYTES)
            rates, dtype = read(content)
            _require_rates(rates)
        except OSError as error:
            raise ValueError(f"file = {self.file}: can't be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"file = {self.file}: {error}") from error
        return RateFile(rates, dtype, hashlib.sha256(content).hexdigest())

    def fingerprint_file(self) -> Mapping[str, Any]:
        file = self.read()
        shape = file.rates.shape
        return {"shape": shape, "dtype": file.dtype, "sha256": file.sha256, "of": "all"}

    def table(self, lr: float, steps: int, steps_per_epoch: int) -> np.ndarray:
        """Return the first `steps` rates of the file, float32 (steps,). Raises ValueError if the
        file has fewer or can't be read."""
        rates = self.read().rates
        if len(rates) < steps:
            raise ValueError(
                f"file = {self.file}: has {len(rates):,} rates, and training has {steps:,} "
                "updates; must have a rate for each"
            )
        return rates[:steps].astype(np.float32)


def _parse_array(content: bytes) -> tuple[np.ndarray, str]:
    """Return the rates in a .npy file, float64, and the array's dtype. Raises ValueError if the
    file doesn't hold an array (updates,) of floats."""
    if not content.startswith(MAGIC_PREFIX):
        raise ValueError("isn't a file that numpy.save writes")
    array = parse_npy("its array", content)
    if array.dtype.name not in FLOATS:
        raise ValueError(f"holds {array.dtype}; must be one of {', '.join(FLOATS)}")
    if array.ndim != 1:
        raise ValueError(f"has shape {array.shape}; must be (updates,), a rate for each update")
    return array.astype(np.float64), array.dtype.name


def _parse_text(content: bytes) -> tuple[np.ndarray, str]:
    """Return the numbers of a text with one number per line, float64, and "text". Raises ValueError
    for text that isn't UTF-8 and for a line that isn't a number."""
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError("isn't text in UTF-8; must have one number a line") from None
    rates = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            try:
                rates.append(float(line))
            except ValueError:
                raise ValueError(f"line {number} is {show(line)}; must be one number") from None
    return np.array(rates, np.float64), "text"


def _require_rates(rates: np.ndarray) -> None:
    """Raise ValueError for no rates, and for a rate that is negative or not finite."""
    if not len(rates):
        raise ValueError("has no rates; must have one for each update")
    # Comparisons with NaN are false, so NaN is wrong too.
    is_wrong = ~((rates >= 0) & (rates <= MAX_FLOAT))
    num_wrong = int(is_wrong.sum())
    if num_wrong:
        first = int(is_wrong.argmax())
        more_text = f", and {num_wrong - 1:,} more are wrong" if num_wrong > 1 else ""
        raise ValueError(
            f"the rate of update {first:,} is {rates[first]:g}{more_text}; must be finite and not "
            "negative"
        )


_READERS: Mapping[str, Callable[[bytes], tuple[np.ndarray, str]]] = {
    ".npy": _parse_array,
    ".csv": _parse_text,
    ".txt": _parse_text,
}
