"""Orders of samples that are grouped by class, by file or by bucket."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache

import numpy as np

from pipeline.data.order import Batches, SampleOrder, compute_epoch_order, draw_permutation

_CLASS_STREAM = 1 << 63
"""Key offset of the draws of classes, so that no epoch and no split has the same key."""

_FILE_STREAM = 3 << 61
"""Key offset of the draws of files, so that no epoch, split and class has the same key."""
_MAX_INDEX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class BalancedOrder(SampleOrder):
    """An order whose epochs have all classes equally often, with differences of at most one.

    An epoch has as many samples as the split. Each epoch continues the shuffles of a class, so that
    all samples of the class are drawn before any is drawn again. An epoch is a pure function of
    (seed, epoch).
    """

    labels: np.ndarray = field(compare=False)
    """The class of each sample, int (samples,)."""

    def batches(self, first_step: int, count: int) -> Batches:
        return replace(super().batches(first_step, count), samples=self.samples)

    def _find_samples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at some positions of an epoch, plus `samples` times the number of
        earlier draws of the sample in the epoch."""
        slots = super()._find_samples(epoch, positions)
        classes = len(self._rows)
        class_ids = slots % classes
        ranks = slots // classes
        indices = np.empty(slots.shape, np.int64)
        for class_id, rows in enumerate(self._rows):
            mask = class_ids == class_id
            count = -(-(self.samples - class_id) // classes)
            indices[mask] = self._draw(class_id, rows, epoch * count, count)[ranks[mask]]
        return indices.astype(np.int32)

    def _draw(self, class_id: int, rows: np.ndarray, first: int, count: int) -> np.ndarray:
        """Return `count` draws of a class from number `first` on, plus `samples` times the number
        of earlier draws of the sample."""
        shuffles, offsets = np.divmod(np.arange(first, first + count), len(rows))
        samples = np.empty(count, np.int64)
        for shuffle in np.unique(shuffles).tolist():
            mask = shuffles == shuffle
            permutation = np.arange(len(rows))
            if self.shuffle:
                permutation = _shuffle_class(self.seed, class_id, shuffle, len(rows))
            samples[mask] = rows[permutation[offsets[mask]]]
        # Each shuffle has a sample once, so the number of earlier shuffles counts earlier draws.
        times = (shuffles - shuffles[0]) % max(1, _MAX_INDEX // self.samples)
        return samples + times * self.samples

    @cached_property
    def _rows(self) -> list[np.ndarray]:
        """The samples of each class, without empty classes."""
        return [np.flatnonzero(self.labels == class_id) for class_id in np.unique(self.labels)]


@lru_cache(maxsize=256)
def _shuffle_class(seed: int, class_id: int, number: int, size: int) -> np.ndarray:
    """Return a permutation of a class's samples, int64 (size,), cached for an epoch."""
    order = draw_permutation(seed, _CLASS_STREAM + (class_id << 40) + number, size)
    order.setflags(write=False)
    return order


@dataclass(frozen=True, kw_only=True)
class InterleavedOrder(SampleOrder):
    """An order that reads `cycle_length` files at a time, one sample each in turn.

    As in tf.data's `interleave`, the next file replaces one that has ended. With `shuffle` and a
    buffer the order of files is drawn from (seed, epoch), and then samples are shuffled within
    `buffer_size`. A shard reads every `num_shards`-th file, from `shard_id` on.
    """

    cycle_length: int
    files: tuple[int, ...]
    """Number of samples in each file; the samples of a file are consecutive in the split."""

    @property
    def shard_samples(self) -> int:
        return sum(self.files[self.shard_id :: self.num_shards])

    def list_reachable(self) -> np.ndarray:
        """Return the samples of the shard's files, in ascending order, int64."""
        ends = np.cumsum(self.files)
        numbers = range(self.shard_id, len(self.files), self.num_shards)
        return np.concatenate([np.arange(ends[n] - self.files[n], ends[n]) for n in numbers])

    def _find_samples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at some positions of an epoch, int64 like `positions`."""
        return _list_interleaved(self, epoch)[positions]


@lru_cache(maxsize=2)
def _list_interleaved(order: InterleavedOrder, epoch: int) -> np.ndarray:
    """Return the samples of a shard's epoch, in order, int64; not shuffled without a buffer."""
    buffer_size = order.buffer_size if order.shuffle else None
    numbers = np.arange(order.shard_id, len(order.files), order.num_shards)
    if buffer_size is not None:
        numbers = numbers[draw_permutation(order.seed, _FILE_STREAM + epoch, len(numbers))]
    sizes = [order.files[number] for number in numbers]
    file_numbers, sample_numbers = interleave(sizes, order.cycle_length)
    samples = (np.cumsum(order.files) - order.files)[numbers][file_numbers] + sample_numbers
    if buffer_size is not None:
        samples = samples[compute_epoch_order(order.seed, epoch, len(samples), True, buffer_size)]
    samples.setflags(write=False)
    return samples


@dataclass(frozen=True, kw_only=True)
class FileShardedOrder(InterleavedOrder):
    """An order whose batches have an equal part from each of `file_shards` groups of files.

    Group g has every `file_shards`-th file, from g on, in the order of an `InterleavedOrder`. So
    with as many processes no file is read by two of them. An epoch ends with the smallest group.
    """

    file_shards: int

    @property
    def batches_per_repetition(self) -> int:
        smallest = min(part.shard_samples for part in self._parts)
        return smallest // (self.batch_size // self.file_shards)

    def batches(self, first_step: int, count: int) -> Batches:
        steps = np.arange(first_step, first_step + count)
        epochs, batch = np.divmod(steps, self.batches_per_repetition)
        size = self.batch_size // self.file_shards
        positions = batch[:, None] * size + np.arange(size)
        indices = np.empty((count, self.file_shards, size), np.int32)
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            for number, part in enumerate(self._parts):
                indices[rows, number] = part._find_samples(epoch, positions[rows])
        counts = np.full(count, self.batch_size, np.int32)
        return Batches(indices.reshape(count, -1), epochs.astype(np.int32), counts)

    @cached_property
    def _parts(self) -> tuple[InterleavedOrder, ...]:
        settings = {f.name: getattr(self, f.name) for f in fields(InterleavedOrder)}
        settings |= {"num_shards": self.file_shards, "batch_size": 1}
        return tuple(
            InterleavedOrder(**{**settings, "shard_id": number})
            for number in range(self.file_shards)
        )


def interleave(files: list[int], cycle_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the file, and the sample in it, at each position of files that are read in turn.

    `files` has the number of samples of each file, in the order of opening. Returns two int64
    arrays with an entry for each sample.
    """
    # As in tf.data, a place whose file has ended skips one turn, then opens the next file.
    free_places = [(0, place) for place in range(min(cycle_length, len(files)))]
    positions = []
    turns = []
    for size in files:
        turn, place = heapq.heappop(free_places)
        positions.append(np.full(size, place))
        turns.append(np.arange(turn, turn + size))
        heapq.heappush(free_places, (turn + size + 1, place))
    order = np.lexsort((np.concatenate(positions), np.concatenate(turns)))
    file_numbers = np.repeat(np.arange(len(files)), files)
    sample_numbers = np.concatenate([np.arange(size) for size in files])
    return file_numbers[order], sample_numbers[order]


@dataclass(frozen=True, kw_only=True)
class BucketedOrder(SampleOrder):
    """An order in which all samples of a batch have one bucket.

    Samples of an epoch wait in their bucket until a batch is full. Samples that still wait at the
    end are dropped, or form the last batches, bucket by bucket, as in MindSpore's
    `bucket_batch_by_length`. The batches of an epoch are a pure function of (seed, epoch).
    """

    buckets: np.ndarray = field(compare=False)
    """The bucket of each sample, int32 (samples,)."""

    def __post_init__(self) -> None:
        if len(self.buckets) != self.samples:
            raise ValueError(
                f"{len(self.buckets)} buckets for {self.samples} samples; must have one for each"
            )
        if self.num_shards > 1:
            raise ValueError("shards of a bucketed split would differ in their number of batches")
        if self.batches_per_repetition == 0:
            max_size = int(np.bincount(self.buckets).max())
            raise ValueError(
                f"a batch of {self.batch_size} can't be filled from any bucket, and "
                "drop_remainder drops batches that aren't full; the batch size must be at most "
                f"{max_size}"
            )
        super().__post_init__()

    @property
    def batches_per_repetition(self) -> int:
        full, remainders = np.divmod(np.bincount(self.buckets), self.batch_size)
        return int(full.sum()) + (0 if self.drop_remainder else int((remainders > 0).sum()))

    @property
    def short_batch(self) -> int:
        """The size of the shortest batch that isn't full; 0 if all are full."""
        sizes = np.bincount(self.buckets) % self.batch_size
        return 0 if self.drop_remainder or not sizes.any() else int(sizes[sizes > 0].min())

    def batches(self, first_step: int, count: int) -> Batches:
        steps = np.arange(first_step, first_step + count)
        epochs, batch = np.divmod(steps, self.batches_per_repetition)
        indices = np.empty((count, self.batch_size), np.int32)
        counts = np.empty(count, np.int32)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            samples, num_valid = self._list_epoch_batches(int(epoch))
            indices[rows] = samples[batch[rows]]
            counts[rows] = num_valid[batch[rows]]
        return Batches(indices, epochs.astype(np.int32), counts)

    def _list_epoch_batches(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an epoch's samples (batches, batch size), and the number of valid ones in each."""
        order = self._compute_epoch(epoch)
        bucket_at = self.buckets[order]
        rows = []
        counts = []
        last_positions = []
        for bucket in range(int(self.buckets.max()) + 1):
            waiting = np.flatnonzero(bucket_at == bucket)
            num_full = len(waiting) // self.batch_size * self.batch_size
            full = waiting[:num_full].reshape(-1, self.batch_size)
            remainder = waiting[num_full:]
            rows.append(full)
            counts.append(np.full(len(full), self.batch_size))
            last_positions.append(full[:, -1])
            if len(remainder) and not self.drop_remainder:
                padding = np.repeat(remainder[:1], self.batch_size - len(remainder))
                rows.append(np.concatenate([remainder, padding])[None])
                counts.append(np.array([len(remainder)]))
                last_positions.append(np.array([self.samples + bucket]))
        time_order = np.argsort(np.concatenate(last_positions))
        return order[np.concatenate(rows)[time_order]], np.concatenate(counts)[time_order]
