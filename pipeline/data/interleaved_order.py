"""The order of samples that are read from several files in turn (D-20)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

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

    def _pass_order(self, pass_: int) -> np.ndarray:
        own = np.arange(self.shard_id, len(self.files), self.num_shards)
        if self.shuffle:
            key = np.array([self.seed, _STREAM + pass_], np.uint64)
            words = np.random.Philox(key=key).random_raw(len(own))
            own = own[np.argsort(words, kind="stable")]
        order = interleave([self.files[number] for number in own], self.cycle_length)
        starts = np.cumsum(self.files) - self.files
        file_of, sample_of = order
        samples = starts[own][file_of] + sample_of
        if self.shuffle:
            window = pass_order(self.seed, pass_, len(samples), True, self.buffer_size)
            samples = samples[window]
        return samples


def interleave(files: list[int], cycle_length: int) -> tuple[np.ndarray, np.ndarray]:
    """The file, and the sample in it, at each position of files that are read in turn.

    `files` are the numbers of samples, in the order in which files are opened. Returns two int64
    arrays of as many entries as there are samples.
    """
    # A place that finds the end of its file loses that turn, and opens the next file in the one
    # after, as in tf.data.
    free = [(0, place) for place in range(cycle_length)]
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
