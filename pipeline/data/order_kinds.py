"""Further orders of samples: grouped by class, by file or by bucket, and mixed by weights."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from pipeline.data.order import (
    MAX_LISTED,
    Batches,
    SampleOrder,
    compute_order_at,
    draw_permutation,
    permute,
)

_CLASS_STREAM = 1 << 63
"""Added to the number in the key of a class's shuffle, so that no other draw has the same key."""
_FILE_STREAM = 3 << 61
"""Added to the epoch in the key of an order of files, so that no other draw has the same key."""
_MIX_STREAM = 5 << 60
"""Added to the number in the key of a cycle of sources, so that no other draw has the same key."""
MIX_CYCLE = 1000
"""Draws in which each source has its share."""
_MAX_INDEX = 2**31 - 1
"""Largest index of a sample, an int32."""


@dataclass(frozen=True, kw_only=True)
class BalancedOrder(SampleOrder):
    """An order whose epochs have all classes equally often, with differences of at most one.

    An epoch has the number of samples of the split. The samples of a class are shuffled again and
    again, and an epoch continues this series from where the epoch before it stopped. So all samples
    of the class are drawn before any is drawn again. An epoch is a pure function of (seed, epoch).
    """

    labels: np.ndarray = field(compare=False)
    """The class of each sample, int (samples,)."""
    ignore_index: int | None = None
    """Label of samples without a class, which aren't drawn; None: all have one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self._rows:
            raise ValueError("no training sample has a class")

    def batches(self, first_step: int, count: int) -> Batches:
        return replace(super().batches(first_step, count), samples=self.samples)

    def _find_samples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return indices as `Batches.indices` has them: of the samples at some positions of an
        epoch, int32 in the shape of `positions`."""
        # Slot s of an epoch has draw s // classes of class s % classes, so classes take turns.
        slots = super()._find_samples(epoch, positions)
        classes = len(self._rows)
        class_ids = slots % classes
        draws = slots // classes
        indices = np.empty(slots.shape, np.int64)
        for class_id, rows in enumerate(self._rows):
            mask = class_ids == class_id
            count = len(range(class_id, self.samples, classes))
            indices[mask] = self._draw(class_id, rows, epoch * count, count)[draws[mask]]
        return indices.astype(np.int32)

    def _draw(self, class_id: int, rows: np.ndarray, first: int, count: int) -> np.ndarray:
        """Return the indices of draws `first` to `first + count - 1` of a class, int64 (count,).
        `rows` are the samples of the class."""
        shuffles, offsets = np.divmod(np.arange(first, first + count), len(rows))
        samples = np.empty(count, np.int64)
        for shuffle in np.unique(shuffles).tolist():
            mask = shuffles == shuffle
            permutation = np.arange(len(rows))
            if self.shuffle:
                permutation = _shuffle_class(self.seed, class_id, shuffle, len(rows))
            samples[mask] = rows[permutation[offsets[mask]]]
        # A shuffle has each sample once, so its number tells repetitions of a sample apart. The
        # modulo limits indices to int32.
        repetitions = (shuffles - shuffles[0]) % max(1, _MAX_INDEX // self.samples)
        return samples + repetitions * self.samples

    @cached_property
    def _rows(self) -> list[np.ndarray]:
        """The samples of each class, without empty classes."""
        classes = np.setdiff1d(self.labels, [] if self.ignore_index is None else self.ignore_index)
        return [np.flatnonzero(self.labels == class_id) for class_id in classes]


@dataclass(frozen=True, kw_only=True)
class MixedOrder(SampleOrder):
    """An order that draws from several sources by weights, which may change at steps.

    Of every `MIX_CYCLE` draws each source has its share, in a random sequence. The samples of a
    source are shuffled again and again, so all are drawn before any is drawn again. All batches are
    full, and an epoch has as many of them as all samples fill. The draws of a step are a pure
    function of (seed, step), whatever the steps before it read.
    """

    sizes: tuple[int, ...]
    """Number of samples of each source, which are consecutive in the split."""
    shares: tuple[tuple[int, tuple[int, ...]], ...]
    """(first step, draws of each source in a cycle), by steps; the first is 0."""

    @property
    def batches_per_repetition(self) -> int:
        return max(1, self.samples // self.batch_size)

    @property
    def short_batch(self) -> int:
        return 0

    @property
    def samples_left_out(self) -> int:
        return 0

    def list_reachable(self) -> np.ndarray:
        is_read = np.any([share for _, share in self.shares], axis=0)
        return np.flatnonzero(np.repeat(is_read, self.sizes))

    def batches(self, first_step: int, count: int) -> Batches:
        steps = np.arange(first_step, first_step + count)
        positions = steps[:, None] * self.batch_size + np.arange(self.batch_size)
        sources, draws = self._draw_sources(positions.ravel())
        indices = np.empty(positions.size, np.int64)
        starts = np.cumsum(self.sizes) - self.sizes
        for source in np.unique(sources).tolist():
            is_of_source = sources == source
            shuffles, rows = self._find_rows(source, draws[is_of_source])
            # The number of a shuffle tells repetitions of a sample apart, within int32.
            repetitions = shuffles % max(1, _MAX_INDEX // self.samples)
            indices[is_of_source] = starts[source] + rows + repetitions * self.samples
        epochs = (steps // self.batches_per_repetition).astype(np.int32)
        counts = np.full(count, self.batch_size, np.int32)
        rows = indices.reshape(positions.shape).astype(np.int32)
        return Batches(rows, epochs, counts, samples=self.samples)

    def _find_rows(self, source: int, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shuffle of each draw from a source, and the row in it, int64 (n,) each."""
        size = self.sizes[source]
        shuffles, rows = np.divmod(draws, size)
        if not self.shuffle:
            return shuffles, rows
        shuffled = np.empty_like(rows)
        for shuffle in np.unique(shuffles).tolist():
            is_in = shuffles == shuffle
            number = _CLASS_STREAM + (source << 40) + shuffle
            if size > MAX_LISTED:
                shuffled[is_in] = permute(rows[is_in], size, self.seed, number)
            else:
                shuffled[is_in] = _shuffle_class(self.seed, source, shuffle, size)[rows[is_in]]
        return shuffles, shuffled

    def _draw_sources(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position since the start of the run, and the number of draws
        from it before, int64 (n,) each."""
        sources, draws = np.empty((2, len(positions)), np.int64)
        firsts = np.array([step * self.batch_size for step, _ in self.shares])
        phases = np.searchsorted(firsts, positions, side="right") - 1
        cycles, places = np.divmod(positions - firsts[phases], MIX_CYCLE)
        for phase, cycle in np.unique(np.stack([phases, cycles]), axis=1).T.tolist():
            is_in = (phases == phase) & (cycles == cycle)
            sequence = self._arrange_cycle(phase, cycle)
            chosen = sequence[places[is_in]]
            before = np.cumsum(sequence[:, None] == np.arange(len(self.sizes)), axis=0) - 1
            earlier = self._earlier[phase] + cycle * np.array(self.shares[phase][1])
            sources[is_in] = chosen
            draws[is_in] = earlier[chosen] + before[places[is_in], chosen]
        return sources, draws

    def _arrange_cycle(self, phase: int, cycle: int) -> np.ndarray:
        """Return the sources of a cycle's draws, int64 (MIX_CYCLE,)."""
        share = self.shares[phase][1]
        number = _MIX_STREAM + (phase << 40) + cycle
        return np.repeat(np.arange(len(share)), share)[
            draw_permutation(self.seed, number, MIX_CYCLE)
        ]

    @cached_property
    def _earlier(self) -> list[np.ndarray]:
        """The draws of each source before each phase, int64 (sources,)."""
        totals = [np.zeros(len(self.sizes), np.int64)]
        for phase, ((first, share), (end, _)) in enumerate(pairwise(self.shares)):
            cycles, rest = divmod((end - first) * self.batch_size, MIX_CYCLE)
            part = np.bincount(self._arrange_cycle(phase, cycles)[:rest], minlength=len(share))
            totals.append(totals[-1] + cycles * np.array(share) + part)
        return totals


def divide_cycle(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the draws of each source among `MIX_CYCLE`, in proportion to the weights, at least 1
    for a weight above 0."""
    exact = MIX_CYCLE * np.array(weights) / sum(weights)
    draws = np.where(exact > 0, np.maximum(np.floor(exact), 1), 0).astype(int)
    while draws.sum() != MIX_CYCLE:
        # Move towards the exact shares where that is farthest, never to 0.
        step = 1 if draws.sum() < MIX_CYCLE else -1
        gaps = np.where((exact > 0) & (draws + step > 0), step * (exact - draws), -np.inf)
        draws[np.argmax(gaps)] += step
    return tuple(draws.tolist())


@lru_cache(maxsize=256)
def _shuffle_class(seed: int, class_id: int, number: int, size: int) -> np.ndarray:
    """Return shuffle `number` of a class, a read-only permutation of 0 to size - 1, int64."""
    permutation = draw_permutation(seed, _CLASS_STREAM + (class_id << 40) + number, size)
    permutation.setflags(write=False)
    return permutation


@dataclass(frozen=True, kw_only=True)
class InterleavedOrder(SampleOrder):
    """An order that reads `cycle_length` files at a time, one sample each in turn.

    When a file ends, the next file takes its place, as in tf.data's `interleave`. With `shuffle`
    and `buffer_size` the order of files is drawn by (seed, epoch), and the interleaved samples are
    shuffled within `buffer_size`. A shard reads every `num_shards`-th file, from `shard_id` on.
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
    """Return the samples that a shard reads in an epoch, in order, int64 (n,), read-only."""
    is_shuffled = order.shuffle and order.buffer_size is not None
    file_ids = np.arange(order.shard_id, len(order.files), order.num_shards)
    if is_shuffled:
        file_ids = file_ids[draw_permutation(order.seed, _FILE_STREAM + epoch, len(file_ids))]
    sizes = [order.files[file_id] for file_id in file_ids]
    file_numbers, sample_numbers = interleave(sizes, order.cycle_length)
    starts = np.cumsum(order.files) - order.files
    samples = starts[file_ids[file_numbers]] + sample_numbers
    if is_shuffled:
        places = np.arange(len(samples))
        samples = samples[
            compute_order_at(places, order.seed, epoch, len(samples), True, order.buffer_size)
        ]
    samples.setflags(write=False)
    return samples


@dataclass(frozen=True, kw_only=True)
class FileShardedOrder(InterleavedOrder):
    """An order whose batches have an equal part from each of `file_shards` groups of files.

    Group g is shard g of an `InterleavedOrder` with `file_shards` shards. With as many processes as
    groups, each file is read by one process. An epoch ends when the smallest group can't fill its
    part of a batch.
    """

    file_shards: int

    @property
    def batches_per_repetition(self) -> int:
        smallest = min(part.shard_samples for part in self._parts)
        return smallest // (self.batch_size // self.file_shards)

    def _find_batches(self, epoch: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = self.batch_size // self.file_shards
        positions = numbers[:, None] * size + np.arange(size)
        samples = [part._find_samples(epoch, positions) for part in self._parts]
        return np.concatenate(samples, axis=1), np.full(len(numbers), self.batch_size)

    @cached_property
    def _parts(self) -> tuple[InterleavedOrder, ...]:
        """The order of each group of files. Only its samples are used, not its batches."""
        settings = {f.name: getattr(self, f.name) for f in fields(InterleavedOrder)}
        settings |= {"num_shards": self.file_shards, "batch_size": 1}
        numbers = range(self.file_shards)
        return tuple(InterleavedOrder(**{**settings, "shard_id": number}) for number in numbers)


def interleave(sizes: list[int], cycle_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of samples when `cycle_length` files are read at a time, one sample each in
    turn: the number of each sample's file, and the sample's number in the file, both int64 (n,).
    `sizes` are the numbers of samples in the files, in the order of opening."""
    # As in tf.data, a place whose file has ended skips one turn, then opens the next file.
    free_places = [(0, place) for place in range(min(cycle_length, len(sizes)))]
    places = []
    turns = []
    for size in sizes:
        turn, place = heapq.heappop(free_places)
        places.append(np.full(size, place))
        turns.append(np.arange(turn, turn + size))
        heapq.heappush(free_places, (turn + size + 1, place))
    order = np.lexsort((np.concatenate(places), np.concatenate(turns)))  # by turn, then by place
    file_numbers = np.repeat(np.arange(len(sizes)), sizes)
    sample_numbers = np.concatenate([np.arange(size) for size in sizes])
    return file_numbers[order], sample_numbers[order]


@dataclass(frozen=True, kw_only=True)
class BucketedOrder(SampleOrder):
    """An order in which all samples of a batch have the same bucket.

    The samples of an epoch are collected in their buckets, and a bucket with `batch_size` samples
    is a batch. At the end the samples that are left in buckets are dropped, or form the last
    batches, bucket by bucket, as in MindSpore's `bucket_batch_by_length`. The batches of an epoch
    are a pure function of (seed, epoch).
    """

    buckets: np.ndarray = field(compare=False)
    """The bucket of each sample, int32 (samples,)."""

    def __post_init__(self) -> None:
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
        short = 0 if self.drop_remainder else np.count_nonzero(remainders)
        return int(full.sum()) + int(short)

    @property
    def short_batch(self) -> int:
        """The size of the shortest batch that isn't full; 0 if all are full."""
        remainders = np.bincount(self.buckets) % self.batch_size
        if self.drop_remainder or not remainders.any():
            return 0
        return int(remainders[remainders > 0].min())

    def _find_batches(self, epoch: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # A full batch has the place in the order of its last sample; short ones follow all full.
        order = self._find_samples(epoch, np.arange(self.samples))
        bucket_at = self.buckets[order]
        positions = []
        counts = []
        last_positions = []
        for bucket in range(int(self.buckets.max()) + 1):
            in_bucket = np.flatnonzero(bucket_at == bucket)
            num_in_full = len(in_bucket) // self.batch_size * self.batch_size
            full = in_bucket[:num_in_full].reshape(-1, self.batch_size)
            remainder = in_bucket[num_in_full:]
            positions.append(full)
            counts.append(np.full(len(full), self.batch_size))
            last_positions.append(full[:, -1])
            if len(remainder) and not self.drop_remainder:
                padding = np.repeat(remainder[:1], self.batch_size - len(remainder))
                positions.append(np.concatenate([remainder, padding])[None])
                counts.append(np.array([len(remainder)]))
                last_positions.append(np.array([self.samples + bucket]))
        batches = np.argsort(np.concatenate(last_positions))[numbers]
        return order[np.concatenate(positions)[batches]], np.concatenate(counts)[batches]
