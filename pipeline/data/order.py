"""The order of samples: shuffling, sharding, batching and repeating, as pure functions.

An epoch reads the dataset, or this run's shard of it, `repeat` times. Each repetition has a
different order and different random draws. In this module `epoch` is the number of the repetition
since the start of the run. The samples of a step don't depend on earlier steps, so a resumed run
continues exactly where it stopped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MAX_LISTED = 2**20
"""Largest number of samples whose full shuffle is stored as a list. Larger splits are shuffled by
`permute`, which stores nothing."""
ROUNDS = 6
"""Rounds of `permute`. Two rounds that collide leave the difference of two numbers as it was, so
after four rounds neighbours are neighbours twice as often as by chance, and five leave a trace too,
with random round functions as well (Patarin, Generic attacks on Feistel schemes, ASIACRYPT 2001).
Each round swaps the two digits, so after an even number of rounds they have their first order."""


def draw_words(seed: int, number: int, count: int) -> np.ndarray:
    """Return random words by the key (seed, number), uint64 (count,): raw words of Philox, which
    are the same in all versions of numpy (NEP 19)."""
    return np.random.Philox(key=np.array([seed, number], np.uint64)).random_raw(count)


def draw_permutation(seed: int, number: int, size: int) -> np.ndarray:
    """Return a random permutation of 0 to size - 1 by the key (seed, number), int64 (size,)."""
    return np.argsort(draw_words(seed, number, size), kind="stable")


def compute_order_at(
    positions: np.ndarray,
    seed: int,
    epoch: int,
    samples: int,
    shuffle: bool,
    buffer_size: int | None,
) -> np.ndarray:
    """Return the samples at some positions of an epoch, int, in their shape. A shuffle draws each
    sample from a buffer of `buffer_size` samples, and puts the next sample in its place. With None
    the buffer has all samples."""
    if not shuffle:
        return positions
    size = samples if buffer_size is None else min(buffer_size, samples)
    if size == samples and samples > MAX_LISTED:
        return permute(positions.ravel(), samples, seed, epoch).reshape(positions.shape)
    return list_shuffled(seed, epoch, samples, size)[positions]


@lru_cache(maxsize=2)
def list_shuffled(seed: int, epoch: int, samples: int, buffer_size: int) -> np.ndarray:
    """Return the sample at each position of a shuffled epoch, int32 (samples,), read-only."""
    order = _shuffle_in_buffer(draw_words(seed, epoch, samples), buffer_size)
    order.setflags(write=False)
    return order


def _shuffle_in_buffer(words: np.ndarray, buffer_size: int) -> np.ndarray:
    """Return the order in which samples 0, 1, ... leave a buffer, int32 (words.size,). Each draw
    takes one of the random `words`, uint64. The modulo's bias is below buffer_size / 2**64."""
    refills = words.size - buffer_size
    slots = (words[:refills] % buffer_size).astype(np.int64)
    # A draw takes the sample that refilled its slot after the last draw from that slot.
    slot_order = np.argsort(slots, kind="stable")
    samples = slots[slot_order]
    is_repeated = samples[1:] == samples[:-1]
    samples[1:][is_repeated] = buffer_size + slot_order[:-1][is_repeated]
    order = np.empty(words.size, np.int32)
    order[slot_order] = samples
    buffer = np.arange(buffer_size)
    buffer[slots] = buffer_size + np.arange(refills)  # The last refill of a slot stays.
    order[refills:] = buffer[np.argsort(words[refills:], kind="stable")]
    return order


def count_shard_samples(samples: int, num_shards: int) -> int:
    """Return the number of samples of each shard, with those that occur twice."""
    return -(-samples // num_shards)


@dataclass(frozen=True)
class Batching:
    """The number and sizes of batches of an epoch, with the recipe's settings of a split. Raises
    ValueError if an epoch has no batch."""

    samples: int
    batch_size: int
    drop_remainder: bool
    repeat: int
    num_shards: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError("there are no samples to make batches of")
        if self.batches_per_repetition == 0:
            size = self.shard_samples
            shard = f" of each of {self.num_shards} shards" if self.num_shards > 1 else ""
            raise ValueError(
                f"a batch of {self.batch_size} can't be filled from {size} samples{shard}, and "
                "drop_remainder drops batches that aren't full; the batch size must be at most "
                f"{size}"
            )

    @property
    def shard_samples(self) -> int:
        """The number of samples that the shard has in one repetition."""
        return count_shard_samples(self.samples, self.num_shards)

    @property
    def batches_per_repetition(self) -> int:
        """The number of batches in one repetition of the dataset or shard."""
        full, remainder = divmod(self.shard_samples, self.batch_size)
        return full + (remainder > 0 and not self.drop_remainder)

    @property
    def short_batch(self) -> int:
        """The size of the last batch if it isn't full, else 0."""
        return 0 if self.drop_remainder else self.shard_samples % self.batch_size

    @property
    def samples_left_out(self) -> int:
        """The number of samples of the shard that one repetition doesn't read."""
        if not self.drop_remainder:
            return 0
        return self.shard_samples - self.batches_per_repetition * self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch, which reads the dataset `repeat` times."""
        return self.batches_per_repetition * self.repeat


@dataclass(frozen=True)
class Batches:
    """Sample indices of consecutive batches."""

    indices: np.ndarray
    """int32 (count, batch). A short batch is padded with its first sample."""
    epochs: np.ndarray
    """int32 (count,): the repetition since the start of the run, for the keys of random draws."""
    counts: np.ndarray
    """int32 (count,): the number of valid samples of each batch."""
    samples: int | None = None
    """The number of samples in the split if an epoch may repeat samples, else None. `indices` then
    have multiples of this number added, so that repetitions of a sample have different keys."""

    @property
    def rows(self) -> np.ndarray:
        """The samples' rows in the split: `indices` modulo `samples`."""
        return self.indices if self.samples is None else self.indices % self.samples


@dataclass(frozen=True, kw_only=True)
class SampleOrder(Batching):
    """The order of a split over any number of epochs: the samples of each step."""

    seed: int
    shuffle: bool
    buffer_size: int | None
    shard_id: int = 0

    def batches(self, first_step: int, count: int) -> Batches:
        """Return `count` batches, from step `first_step` of the run on; the first step is 0."""
        steps = np.arange(first_step, first_step + count)
        epochs, batch_numbers = np.divmod(steps, self.batches_per_repetition)
        indices = np.empty((count, self.batch_size), np.int32)
        counts = np.empty(count, np.int32)
        for epoch in np.unique(epochs).tolist():
            mask = epochs == epoch
            indices[mask], counts[mask] = self._find_batches(epoch, batch_numbers[mask])
        return Batches(indices, epochs.astype(np.int32), counts)

    def list_reachable(self) -> np.ndarray:
        """Return the samples that epochs draw from, int64 (n,): of the shard, or all if it changes.
        Without a shuffle, `drop_remainder` drops the last of them."""
        if self.num_shards > 1 and (not self.shuffle or self.buffer_size is not None):
            return self._to_split_positions(np.arange(self.shard_samples))
        return np.arange(self.samples)

    def _find_batches(self, epoch: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of the batches with these numbers in an epoch, int (n, batch), and the
        number of valid samples of each, int (n,)."""
        positions = numbers[:, None] * self.batch_size + np.arange(self.batch_size)
        is_valid = positions < self.shard_samples
        positions = np.where(is_valid, positions, positions[:, :1])
        return self._find_samples(epoch, positions), is_valid.sum(axis=1)

    def _find_samples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at some positions of an epoch, in the shape of `positions`.

        As in MindSpore, a full shuffle (a reader's `shuffle=True`) precedes sharding, so a shard
        has different samples in each epoch; a shuffle in a buffer (`shuffle(n)`) follows sharding,
        so a shard has the same samples in each epoch.
        """
        if self.shuffle and self.buffer_size is not None:
            size = self.shard_samples
            positions = compute_order_at(positions, self.seed, epoch, size, True, self.buffer_size)
            return self._to_split_positions(positions)
        positions = self._to_split_positions(positions)
        return compute_order_at(positions, self.seed, epoch, self.samples, self.shuffle, None)

    def _to_split_positions(self, positions: np.ndarray) -> np.ndarray:
        """Return the positions in the split, int64, of positions in the shard.

        They are shard_id, shard_id + num_shards, ... All shards have the same size: up to
        num_shards - 1 of the last positions are the first ones of the split again, as in
        MindSpore's DistributedSampler.
        """
        return (positions.astype(np.int64) * self.num_shards + self.shard_id) % self.samples


def permute(positions: np.ndarray, size: int, seed: int, number: int) -> np.ndarray:
    """Return the elements at `positions`, int (n,), of a permutation of 0 to size - 1, int64 (n,).

    The permutation is drawn by (seed, number), and isn't stored. It is a Feistel network over pairs
    of digits, with radices whose product is `size` or slightly more. A result of `size` or more is
    permuted again until it is smaller (Black and Rogaway, Ciphers with arbitrary finite domains,
    CT-RSA 2002, sections 4 and 5). The keys of rounds are raw words of Philox. The round function
    is the finaliser of MurmurHash3, which isn't a cipher, but suffices for shuffles. Raises
    ValueError unless 0 < size <= 2**32.
    """
    if not 0 < size <= 2**32:
        raise ValueError(f"a permutation of {size} numbers: must be 1 to 2**32")
    words = draw_words(seed, number, ROUNDS).tolist()
    keys = [(np.uint32(word & 0xFFFFFFFF), np.uint32(word >> 32)) for word in words]
    high = math.isqrt(size - 1) + 1
    low = -(-size // high)
    numbers = _permute_digits(positions, high, low, keys)
    out_of_range = np.flatnonzero(numbers >= size)
    while out_of_range.size:
        numbers[out_of_range] = _permute_digits(numbers[out_of_range], high, low, keys)
        out_of_range = out_of_range[numbers[out_of_range] >= size]
    return numbers


def _permute_digits(
    numbers: np.ndarray, high: int, low: int, keys: list[tuple[np.uint32, np.uint32]]
) -> np.ndarray:
    """Permute numbers below high * low, int (n,), by a round for each key. Returns int64 (n,)."""
    # The digits of a number: number = left * low + right.
    left, right = np.divmod(numbers.astype(np.uint32), np.uint32(low))
    radices = high, low
    for first, second in keys:
        mixed = _mix_hash((right ^ first) + second)
        # Scale the 32-bit hash to 0..radix - 1. A remainder would take three times as long.
        shifted = left + (mixed * np.uint64(radices[0]) >> np.uint64(32)).astype(np.uint32)
        # Reduce the sum modulo the radix. If it is below the radix, sum - radix wraps to more.
        left, right = right, np.minimum(shifted, shifted - np.uint32(radices[0]))
        radices = radices[::-1]
    return left.astype(np.int64) * low + right


def _mix_hash(values: np.ndarray) -> np.ndarray:
    """Return the finaliser of MurmurHash3 of uint32 values."""
    values = (values ^ (values >> 16)) * np.uint32(0x85EBCA6B)
    values = (values ^ (values >> 13)) * np.uint32(0xC2B2AE35)
    return values ^ (values >> 16)
