"""The order of samples that are read from several files in turn."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipeline.data.order import SampleOrder, pass_order

_STREAM = 3 << 61
"""Keys of these draws, clear of those of passes, of splits and of classes."""


@dataclass(frozen=True, kw_only=True)
class InterleavedOrder(SampleOrder):
    """The endless order of a split whose files are read `cycle_length` at a time, one sample each.

    As tf.data's `interleave`: where a file has ended, the next one takes its place. With `shuffle`
    the files of a pass come in an order drawn by (seed, pass), and samples are then shuffled within
    `buffer_size`. A shard reads files of its own: every `num_shards`-th, from `shard_id` on.
    """

    cycle_length: int
    files: tuple[int, ...]
    """Number of samples in each file; those of a file follow one another in the split."""

    @property
    def shard_samples(self) -> int:
        """The number of samples of one repetition: those of the shard's files."""
        return sum(self.files[self.shard_id :: self.num_shards])

    def reachable(self) -> np.ndarray:
        """The samples of the shard's files, in ascending order, int64."""
        ends = np.cumsum(self.files)
        own = range(self.shard_id, len(self.files), self.num_shards)
        return np.concatenate([np.arange(ends[n] - self.files[n], ends[n]) for n in own])

    def _samples_at(self, pass_: int, places: np.ndarray) -> np.ndarray:
        """The samples at some positions of a pass, int64 like `places`."""
        return _interleaved_pass(self, pass_)[places]


@lru_cache(maxsize=2)
def _interleaved_pass(order: InterleavedOrder, pass_: int) -> np.ndarray:
    """The samples of a shard's pass, in order, int64; without a buffer files are not shuffled."""
    buffer_size = order.buffer_size if order.shuffle else None
    numbers = np.arange(order.shard_id, len(order.files), order.num_shards)
    if buffer_size is not None:
        key = np.array([order.seed, _STREAM + pass_], np.uint64)
        words = np.random.Philox(key=key).random_raw(len(numbers))
        numbers = numbers[np.argsort(words, kind="stable")]
    sizes = [order.files[number] for number in numbers]
    file_of, sample_of = interleave(sizes, order.cycle_length)
    samples = (np.cumsum(order.files) - order.files)[numbers][file_of] + sample_of
    if buffer_size is not None:
        samples = samples[pass_order(order.seed, pass_, len(samples), True, buffer_size)]
    samples.setflags(write=False)
    return samples


def interleave(files: list[int], cycle_length: int) -> tuple[np.ndarray, np.ndarray]:
    """The file, and the sample in it, at each position of files that are read in turn.

    `files` are the numbers of samples, in the order in which files are opened. Returns two int64
    arrays of as many entries as there are samples.
    """
    # A place that finds the end of its file loses that turn, and opens the next file in the one
    # after, as in tf.data.
    free = [(0, place) for place in range(min(cycle_length, len(files)))]
    places, turns = [], []
    for size in files:
        turn, place = heapq.heappop(free)
        places.append(np.full(size, place))
        turns.append(np.arange(turn, turn + size))
        heapq.heappush(free, (turn + size + 1, place))
    order = np.lexsort((np.concatenate(places), np.concatenate(turns)))
    file_of = np.repeat(np.arange(len(files)), files)
    sample_of = np.concatenate([np.arange(size) for size in files])
    return file_of[order], sample_of[order]
