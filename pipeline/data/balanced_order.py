"""The order of samples where each class is drawn as often as any other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from pipeline.data.order import Batches, SampleOrder

_STREAM = 1 << 63
"""Keys of these draws, clear of those of passes and of splits."""
_MAX_INDEX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class BalancedOrder(SampleOrder):
    """The endless order of a split whose passes have all classes equally often, give or take one.

    A pass has as many samples as the split. Those of a class come in an endless sequence of
    shuffles of all of them, in which a pass goes on where the one before has stopped: none is drawn
    again before all were drawn. Any pass is still a pure function of (seed, pass).
    """

    labels: np.ndarray = field(compare=False)
    """The class of each sample, int (samples,)."""

    def batches(self, first_step: int, count: int) -> Batches:
        """The `count` batches that begin with global step `first_step`, the first step being 0."""
        return replace(super().batches(first_step, count), samples=self.samples)

    def _samples_at(self, pass_: int, places: np.ndarray) -> np.ndarray:
        """The samples at some positions of a pass: each plus `samples` times the number of its
        draws in this pass so far."""
        slots = super()._samples_at(pass_, places)
        classes = len(self._rows)
        kinds, ranks = slots % classes, slots // classes
        drawn = np.empty(slots.shape, np.int64)
        for kind, rows in enumerate(self._rows):
            mine = kinds == kind
            per_pass = -(-(self.samples - kind) // classes)
            drawn[mine] = self._drawn(kind, rows, pass_ * per_pass, per_pass)[ranks[mine]]
        return drawn.astype(np.int32)

    def _drawn(self, kind: int, rows: np.ndarray, first: int, count: int) -> np.ndarray:
        """Entries `first` and following of a class's sequence, and how often each came before."""
        places = np.arange(first, first + count)
        shuffles, offsets = np.divmod(places, len(rows))
        samples = np.empty(count, np.int64)
        for shuffle in np.unique(shuffles).tolist():
            here = shuffles == shuffle
            samples[here] = rows[self._shuffle(kind, shuffle, len(rows))[offsets[here]]]
        # A shuffle repeats none, and so a sample of this pass comes at most once in each.
        times = (shuffles - shuffles[0]) % max(1, _MAX_INDEX // self.samples)
        return samples + times * self.samples

    def _shuffle(self, kind: int, number: int, size: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(size)
        return _class_shuffle(self.seed, kind, number, size)

    @cached_property
    def _rows(self) -> list[np.ndarray]:
        """The samples of each class that has any."""
        return [np.flatnonzero(self.labels == kind) for kind in np.unique(self.labels)]


@lru_cache(maxsize=256)
def _class_shuffle(seed: int, kind: int, number: int, size: int) -> np.ndarray:
    """A permutation of the samples of a class, int64 (size,); windows of one pass share it."""
    key = np.array([seed, _STREAM + (kind << 40) + number], np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")
    order.setflags(write=False)
    return order
