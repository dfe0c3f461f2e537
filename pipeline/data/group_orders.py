"""Orders of samples that are grouped by class, by file or by bucket."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache

import numpy as np

from pipeline.data.order import Batches, SampleOrder, compute_epoch_order, draw_permutation

_CLASS_STREAM = 1 << 63
"""Added to the number in the key of a class's shuffle, so that no other draw has the same key."""
_FILE_STREAM = 3 << 61
"""Added to the epoch in the key of an order of files, so that no other draw has the same key."""
_MAX_INDEX = 2**31 - 1
"""Largest index of a sample, an int32."""


@dataclass(frozen=True, kw_only=True)
class BalancedOrder(SampleOrder):
    """An order whose epochs have all classes equally often, with differences of at most one.

    An epoch has as many samples as the split. A class has an endless series of shuffles of its
    samples, and each epoch draws on from where the epoch before it stopped. So all samples of the
    class are drawn before any is drawn again. An epoch is a pure function of (seed, epoch).
    """

    labels: np.ndarray = field(compare=False)
    """The class of each sample, int (samples,)."""

    def batches(self, first_step: int, count: int) -> Batches:
        return replace(super().batches(first_step, count), samples=self.samples)

    def _find_samples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the indices of the samples at some positions of an epoch, as `Batches.samples`
        describes, int32 in the shape of `positions`."""
        # Slot s of an epoch has draw s // classes of class s % classes, so classes take turns.
        slots = super()._find_samples(epoch, positions)
        classes = len(self._rows)
        class_ids = slots % classes
        draws = slots // classes
        indices = np.empty(slots.shape, np.int64)
        for class_id, rows in enumerate(self._rows):
            mask = class_ids == class_id
            count = -(-(self.samples - class_id) // classes)
            indices[mask] = self._draw(class_id, rows, epoch * count, count)[draws[mask]]
        return indices.astype(np.int32)

    def _draw(self, class_id: int, rows: np.ndarray, first: int, count: int) -> np.ndarray:
        """Return `count` draws of a class, from number `first` on, as indices, int64 (count,)."""
        shuffles, offsets = np.divmod(np.arange(first, first + count), len(rows))
        samples = np.empty(count, np.int64)
        for shuffle in np.unique(shuffles).tolist():
            mask = shuffles == shuffle
            permutation = np.arange(len(rows))
            if self.shuffle:
                permutation = _shuffle_class(self.seed, class_id, shuffle, len(rows))
            samples[mask] = rows[permutation[offsets[mask]]]
        # Each shuffle has a sample once, so two draws of a sample have different shuffles. The
        # modulo keeps indices below 2**31.
        repetitions = (shuffles - shuffles[0]) % max(1, _MAX_INDEX // self.samples)
        return samples + repetitions * self.samples

    @cached_property
    def _rows(self) -> list[np.ndarray]:
        """The samples of each class, without empty classes."""
        return [np.flatnonzero(self.labels == class_id) for class_id in np.unique(self.labels)]


@lru_cache(maxsize=256)
def _shuffle_class(seed: int, class_id: int, number: int, size: int) -> np.ndarray:
    """Return shuffle `number` of a class, a read-only permutation of 0 to size - 1, int64."""
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
        file_ids = range(self.shard_id, len(self.files), self.num_shards)
        return np.concatenate([np.arange(ends[i] - self.files[i], ends[i]) for i in file_ids])

    def _find_samples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return _list_interleaved(self, epoch)[positions]


@lru_cache(maxsize=2)
def _list_interleaved(order: InterleavedOrder, epoch: int) -> np.ndarray:
    """Return the samples that a shard reads in an epoch, in order, int64 (n,), read-only. Without a
    buffer neither files nor samples are shuffled."""
    buffer_size = order.buffer_size if order.shuffle else None
    file_ids = np.arange(order.shard_id, len(order.files), order.num_shards)
    if buffer_size is not None:
        file_ids = file_ids[draw_permutation(order.seed, _FILE_STREAM + epoch, len(file_ids))]
    sizes = [order.files[file_id] for file_id in file_ids]
    file_numbers, sample_numbers = interleave(sizes, order.cycle_length)
    starts = np.cumsum(order.files) - order.files
    samples = starts[file_ids[file_numbers]] + sample_numbers
    if buffer_size is not None:
        samples = samples[compute_epoch_order(order.seed, epoch, len(samples), True, buffer_size)]
    samples.setflags(write=False)
    return samples


@dataclass(frozen=True, kw_only=True)
class FileShardedOrder(InterleavedOrder):
    """An order whose batches have an equal part from each of `file_shards` groups of files.

    Group g has every `file_shards`-th file, from g on, in the order of an `InterleavedOrder`. With
    `file_shards` processes each file is read by one process. An epoch ends when the smallest group
    can't fill its part of a batch.
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
            mask = epochs == epoch
            for number, part in enumerate(self._parts):
                indices[mask, number] = part._find_samples(epoch, positions[mask])
        counts = np.full(count, self.batch_size, np.int32)
        return Batches(indices.reshape(count, -1), epochs.astype(np.int32), counts)

    @cached_property
    def _parts(self) -> tuple[InterleavedOrder, ...]:
        """The order of each group of files. Its batches aren't used, and have one sample."""
        settings = {f.name: getattr(self, f.name) for f in fields(InterleavedOrder)}
        settings |= {"num_shards": self.file_shards, "batch_size": 1}
        numbers = range(self.file_shards)
        return tuple(InterleavedOrder(**{**settings, "shard_id": number}) for number in numbers)


def interleave(files: list[int], cycle_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of samples if `cycle_length` files are read at a time, one sample in turn.
    `files` has the number of samples of each file, in the order of opening. Returns the index in
    `files` and the index in the file of each sample, two int64 arrays."""
    # As in tf.data, a place whose file has ended skips one turn, then opens the next file.
    free_places = [(0, place) for place in range(min(cycle_length, len(files)))]
    places = []
    turns = []
    for size in files:
        turn, place = heapq.heappop(free_places)
        places.append(np.full(size, place))
        turns.append(np.arange(turn, turn + size))
        heapq.heappush(free_places, (turn + size + 1, place))
    order = np.lexsort((np.concatenate(places), np.concatenate(turns)))  # by turn, then by place
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
        super().__post_init__()  # whose error for a large batch has the size of the split

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
            mask = epochs == epoch
            samples, num_valid = self._list_epoch_batches(int(epoch))
            indices[mask] = samples[batch[mask]]
            counts[mask] = num_valid[batch[mask]]
        return Batches(indices, epochs.astype(np.int32), counts)

    def _list_epoch_batches(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an epoch's samples (batches, batch size), and the number of valid samples in each
        batch, (batches,). Batches are ordered by their last sample, short batches at the end."""
        order = self._compute_epoch(epoch)
        bucket_at = self.buckets[order]
        positions = []
        counts = []
        last_positions = []
        for bucket in range(int(self.buckets.max()) + 1):
            waiting = np.flatnonzero(bucket_at == bucket)
            num_full = len(waiting) // self.batch_size * self.batch_size
            full = waiting[:num_full].reshape(-1, self.batch_size)
            remainder = waiting[num_full:]
            positions.append(full)
            counts.append(np.full(len(full), self.batch_size))
            last_positions.append(full[:, -1])
            if len(remainder) and not self.drop_remainder:
                padding = np.repeat(remainder[:1], self.batch_size - len(remainder))
                positions.append(np.concatenate([remainder, padding])[None])
                counts.append(np.array([len(remainder)]))
                last_positions.append(np.array([self.samples + bucket]))
        time_order = np.argsort(np.concatenate(last_positions))
        return order[np.concatenate(positions)[time_order]], np.concatenate(counts)[time_order]
