"""Poisson sampling, the order of private runs: each step draws all samples independently."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.core.errors import RunError
from pipeline.data.order import Batches, SampleOrder, draw_words

OVERFLOW_SHARE = 1e-12
"""Largest probability, as a share of delta, that a step draws more samples than fit a batch."""
_CANARY_STREAM = 1 << 62
"""Number in the key that draws which canaries are trained on, larger than any step."""


@dataclass(frozen=True, kw_only=True)
class PoissonOrder(SampleOrder):
    """An order whose steps draw each sample with probability `expected_batch_size` / `samples`.

    A batch has the samples that its step draws, and is padded to `batch_size`. If the step draws
    more than `batch_size`, the last ones are left out: `find_expected_batch_size` makes that
    improbable. The samples are a pure function of (key, step). `Batches.epochs` has the step, so
    that random ops have new random numbers whenever a sample is drawn.
    """

    expected_batch_size: int
    canaries: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), compare=False)
    """Samples, int64 (n,), each of which the run leaves out of all steps with probability 1/2."""
    key: tuple[int, int] | None = field(default=None, repr=False)
    """The secret key: its lower and upper 32 bits. None until a run sets it."""

    @property
    def batches_per_repetition(self) -> int:
        return self.samples // self.expected_batch_size

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
            if len(rows):
                indices[row] = rows[0]
                indices[row, : len(rows)] = rows
        return Batches(indices, np.arange(first_step, first_step + count, dtype=np.int32), counts)

    def draw_members(self) -> np.ndarray:
        """Return whether each canary is trained on, bool (n,)."""
        return self._draw_words(_CANARY_STREAM, len(self.canaries)) < np.uint64(2**63)

    def _draw_words(self, number: int, count: int) -> np.ndarray:
        """Return random uint64 (count,), a pure function of the key and a number."""
        if self.key is None:
            raise RunError("privacy: only a run with its secret can draw samples")
        return draw_words(self.key[0] | self.key[1] << 32, number, count)


def make_poisson_order(
    settings: Mapping[str, Any], delta: float, expected_batch_size: int | None
) -> PoissonOrder:
    """Return the order with the settings of a `SampleOrder`; None expects as many samples a step as
    fit. Raises ValueError, beginning with `batch_size`, if a step may draw too many samples, or if
    more are expected than there are."""
    size = settings["batch_size"]
    samples = settings["samples"]
    fitting = find_expected_batch_size(samples, size, OVERFLOW_SHARE * delta)
    expected = expected_batch_size or fitting
    if expected > samples:
        raise ValueError(
            f"batch_size = {size}: privacy.expected_batch_size = {expected} must be at most the "
            f"{samples} samples"
        )
    if expected > fitting:
        raise ValueError(
            f"batch_size = {size}: must be larger for privacy.expected_batch_size = {expected},"
            f" or steps would leave out samples; {size} is enough for {fitting}"
        )
    return PoissonOrder(**settings, expected_batch_size=expected)


def find_expected_batch_size(samples: int, batch_size: int, overflow: float) -> int:
    """Return the largest expected batch size with which a step draws more than `batch_size` samples
    with a probability of at most `overflow`. Raises ValueError if even size 1 exceeds it."""
    if samples <= batch_size:
        return samples
    # The probability grows with the size, so a bisection finds the number of sizes, from 1 on, for
    # which it is at most `overflow`. This number is the largest of them.
    sizes = range(1, max(2, batch_size))
    largest = bisect_right(
        sizes, overflow, key=lambda size: compute_overflow(samples, batch_size, size)
    )
    if largest == 0:
        raise ValueError(f"batch_size = {batch_size}: is too small for Poisson sampling")
    return largest


def compute_overflow(samples: int, batch_size: int, expected_batch_size: int) -> float:
    """Return the probability that a step draws more than `batch_size` of the samples."""
    from scipy.stats import binom

    return float(binom.sf(batch_size, samples, expected_batch_size / samples))
