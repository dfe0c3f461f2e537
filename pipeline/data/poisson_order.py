"""Poisson sampling: each step draws each sample with the same probability."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from pipeline.core.errors import RunError
from pipeline.data.order import Batches, SampleOrder, draw_words

_CANARY_STREAM = 1 << 62
"""Number in the key that draws which canaries are trained on, larger than any step's."""


@dataclass(frozen=True, kw_only=True)
class PoissonOrder(SampleOrder):
    """An order whose steps draw each sample with probability `expected_batch_size` / `samples`.

    A step has as many samples as it draws, padded to `batch_size`. It leaves out further samples,
    which must be improbable (`find_expected_batch_size`). Its samples are a pure function of (key,
    step). `Batches.epochs` has the step, so that random ops draw again whenever a sample is drawn.
    """

    expected_batch_size: int
    canaries: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), compare=False)
    """Samples that the run leaves out of all steps with probability 1/2 each, int64 (n,)."""
    key: tuple[int, int] | None = field(default=None, repr=False)
    """Two secret words of 32 bits, the lower one first; None until a run sets them."""

    @property
    def batches_per_repetition(self) -> int:
        return max(1, self.samples // self.expected_batch_size)

    @property
    def short_batch(self) -> int:
        return 0

    @property
    def rate(self) -> float:
        """The probability that a step draws a sample."""
        return self.expected_batch_size / self.samples

    def batches(self, first_step: int, count: int) -> Batches:
        indices = np.zeros((count, self.batch_size), np.int32)
        counts = np.zeros(count, np.int32)
        threshold = np.uint64(min(round(self.rate * 2**64), 2**64 - 1))
        is_left_out = np.zeros(self.samples, bool)
        is_left_out[self.canaries[~self.draw_members()]] = True
        for row, step in enumerate(range(first_step, first_step + count)):
            is_drawn = self._draw_words(step, self.samples) < threshold
            rows = np.flatnonzero(is_drawn & ~is_left_out)[: self.batch_size]
            counts[row] = len(rows)
            indices[row, : len(rows)] = rows
            indices[row, len(rows) :] = rows[0] if len(rows) else 0
        return Batches(indices, np.arange(first_step, first_step + count, dtype=np.int32), counts)

    def draw_members(self) -> np.ndarray:
        """Return whether each canary is trained on, bool (n,)."""
        return self._draw_words(_CANARY_STREAM, len(self.canaries)) < np.uint64(2**63)

    def _draw_words(self, number: int, count: int) -> np.ndarray:
        """Return random uint64 (count,), a pure function of the key and a number."""
        if self.key is None:
            raise RunError("privacy: only a run with its secret can draw samples")
        return draw_words(self.key[0] | self.key[1] << 32, number, count)


def find_expected_batch_size(samples: int, batch_size: int, overflow: float) -> int:
    """Return the largest expected batch size for which the probability that a step draws more than
    `batch_size` samples is at most `overflow`. Raises ValueError if there is none."""
    if samples <= batch_size:
        return samples
    sizes = range(1, max(2, batch_size))
    # The probability grows with the size. Sizes start at 1, so their number is the largest size.
    largest = bisect_right(sizes, overflow, key=lambda n: compute_overflow(samples, batch_size, n))
    if largest == 0:
        raise ValueError(f"batch_size = {batch_size}: is too small for Poisson sampling")
    return largest


def compute_overflow(samples: int, batch_size: int, expected_batch_size: int) -> float:
    """Return the probability that a step draws more than `batch_size` of the samples."""
    from scipy.stats import binom

    return float(binom.sf(batch_size, samples, expected_batch_size / samples))
