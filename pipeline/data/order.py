"""The order of samples: shuffling, sharding, batching and repeating, as pure functions.

An epoch reads the dataset, or this run's shard of it, `repeat` times. Each repetition has a
different order and different random draws. Functions that compute an order count repetitions from
the start of the run, and call this count `epoch`. The samples of a step don't depend on earlier
steps, so a resumed run continues exactly where it stopped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LARGE = 2**20
"""Number of samples above which a full shuffle calls `permute`, which lists no epoch."""

ROUNDS = 4
"""A Feistel network of random functions is a random permutation from four rounds on (Luby and
Rackoff, SIAM Journal on Computing 17, 1988). The number is even, as each round swaps the digits."""


def draw_words(seed: int, number: int, count: int) -> np.ndarray:
    """Draw words by a key, uint64 (count,): raw Philox, which numpy keeps stable (NEP 19)."""
    return np.random.Philox(key=np.array([seed, number], np.uint64)).random_raw(count)


def draw_permutation(seed: int, number: int, size: int) -> np.ndarray:
    """Draw a permutation of 0 to size - 1 by a key, int64 (size,)."""
    return np.argsort(draw_words(seed, number, size), kind="stable")


@lru_cache(maxsize=2)
def compute_epoch_order(
    seed: int, epoch: int, samples: int, shuffle: bool, buffer_size: int | None
) -> np.ndarray:
    """Return the sample at each position of an epoch: a read-only permutation, int32 (samples,).

    A shuffle draws each sample from a buffer of `buffer_size` samples, which is refilled with the
    next sample. None is a buffer as large as the dataset.
    """
    if shuffle and samples > LARGE and (buffer_size or samples) >= samples:
        order = permute(np.arange(samples), samples, seed, epoch).astype(np.int32)
    elif shuffle:
        words = draw_words(seed, epoch, samples)
        order = _shuffle_in_buffer(words, min(buffer_size or samples, samples))
    else:
        order = np.arange(samples, dtype=np.int32)
    order.setflags(write=False)
    return order


def compute_order_at(
    positions: np.ndarray,
    seed: int,
    epoch: int,
    samples: int,
    shuffle: bool,
    buffer_size: int | None,
) -> np.ndarray:
    """Return the samples at some positions of `compute_epoch_order`, int like `positions`."""
    if not shuffle:
        return positions
    if samples > LARGE and (buffer_size or samples) >= samples:
        return permute(positions.ravel(), samples, seed, epoch).reshape(positions.shape)
    return compute_epoch_order(seed, epoch, samples, shuffle, buffer_size)[positions]


def _shuffle_in_buffer(words: np.ndarray, buffer_size: int) -> np.ndarray:
    """Return an order drawn from a buffer that is refilled, int32 (words.size,).

    Each position takes one random 64-bit word. The bias of the modulo is below buffer_size / 2**64.
    """
    refills = words.size - buffer_size
    slots = (words[:refills] % buffer_size).astype(np.int64)
    # A draw returns the sample that refilled the slot after the previous draw from it.
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


def list_shard_indices(samples: int, num_shards: int, shard_id: int) -> np.ndarray:
    """Return the positions of an epoch that a shard reads: shard_id, shard_id + num_shards, ...

    As in MindSpore's DistributedSampler, shards are filled up to the same size by samples of the
    epoch's start, so that up to num_shards - 1 samples occur twice. Returns int64
    (ceil(samples / num_shards),).
    """
    positions = np.arange(shard_samples(samples, num_shards))
    return find_shard_positions(positions, samples, num_shards, shard_id)


def find_shard_positions(
    positions: np.ndarray, samples: int, num_shards: int, shard_id: int
) -> np.ndarray:
    """Convert positions in a shard (`positions`) to positions in the epoch, int64."""
    return (positions.astype(np.int64) * num_shards + shard_id) % max(samples, 1)


def shard_samples(samples: int, num_shards: int) -> int:
    """Return the number of samples of each shard."""
    return -(-samples // num_shards)


@dataclass(frozen=True)
class Batching:
    """The number and sizes of batches of an epoch. Raises ValueError if an epoch has no batch."""

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
        """The number of samples of the shard, without repetition."""
        return shard_samples(self.samples, self.num_shards)

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
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch, which reads the dataset `repeat` times."""
        return self.batches_per_repetition * self.repeat


@dataclass(frozen=True)
class Batches:
    """Sample indices of consecutive batches."""

    indices: np.ndarray
    """int32 (count, batch). A short batch is padded with its first sample."""
    epochs: np.ndarray
    """int32 (count,): epoch * repeat + repetition, which keys of random draws call `epoch`."""
    counts: np.ndarray
    """int32 (count,): the number of valid samples of each batch."""
    samples: int | None = None
    """Number of samples, if an epoch may repeat samples. An index is the sample plus a multiple of
    this number, so that each repetition has a different key. None: indices are samples."""

    @property
    def rows(self) -> np.ndarray:
        """The samples: `indices` modulo `samples`."""
        return self.indices if self.samples is None else self.indices % self.samples


@dataclass(frozen=True, kw_only=True)
class SampleOrder(Batching):
    """The order of a split over any number of epochs: the samples of each step."""

    seed: int
    shuffle: bool
    buffer_size: int | None
    shard_id: int = 0

    def batches(self, first_step: int, count: int) -> Batches:
        """Return `count` batches, from global step `first_step` on; the first step is 0."""
        steps = np.arange(first_step, first_step + count)
        epochs, batch = np.divmod(steps, self.batches_per_repetition)
        positions = batch[:, None] * self.batch_size + np.arange(self.batch_size)
        mask = positions < self.shard_samples
        positions = np.where(mask, positions, positions[:, :1])
        indices = np.empty(positions.shape, np.int32)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            indices[rows] = self._find_samples(int(epoch), positions[rows])
        return Batches(indices, epochs.astype(np.int32), mask.sum(axis=1, dtype=np.int32))

    def list_reachable(self) -> np.ndarray:
        """Return the samples that some epoch reads, int64: all, unless a shard has the same ones in
        each epoch."""
        if self.num_shards > 1 and (not self.shuffle or self.buffer_size is not None):
            return list_shard_indices(self.samples, self.num_shards, self.shard_id)
        return np.arange(self.samples)

    def _find_samples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at some positions of an epoch, in the shape of `positions`.

        A full shuffle precedes sharding, as in MindSpore's readers (`shuffle=True`), so that a
        shard has different samples in each epoch. A shuffle in a buffer follows sharding, like
        `shuffle(n)`, so that a shard has the same samples in each epoch.
        """
        if self.shuffle and self.buffer_size is not None:
            size = self.shard_samples
            positions = compute_order_at(positions, self.seed, epoch, size, True, self.buffer_size)
            return find_shard_positions(positions, self.samples, self.num_shards, self.shard_id)
        numbers = find_shard_positions(positions, self.samples, self.num_shards, self.shard_id)
        return compute_order_at(numbers, self.seed, epoch, self.samples, self.shuffle, None)

    def _compute_epoch(self, epoch: int) -> np.ndarray:
        """Return the samples of an epoch, in order, int (samples of the shard,)."""
        return self._find_samples(epoch, np.arange(self.shard_samples))


def permute(positions: np.ndarray, size: int, seed: int, number: int) -> np.ndarray:
    """Return the numbers at places (n,) of a permutation of 0 to size - 1, int64 (n,).

    The permutation is chosen by (seed, number), and takes no memory. It is a Feistel network over
    pairs of digits, with radices whose product is `size` or slightly more. A number of `size` or
    more is permuted again until it is below (Black and Rogaway, Ciphers with arbitrary finite
    domains, CT-RSA 2002, sections 4 and 5). Round keys are raw Philox words. The round function is
    the finaliser of MurmurHash3, which isn't a cipher, but suffices for samples. Raises ValueError
    unless 0 < size <= 2**32.
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
    """Permute numbers below high * low, int (n,). Returns int64 (n,)."""
    left = numbers.astype(np.uint32) // np.uint32(low)
    right = numbers.astype(np.uint32) - left * np.uint32(low)
    radices = high, low
    mixed = np.empty_like(left)
    buffer = np.empty_like(left)
    products = np.empty(left.shape, np.uint64)
    for first, second in keys:
        np.bitwise_xor(right, first, out=mixed)
        np.add(mixed, second, out=mixed)
        _mix_hash(mixed, buffer)
        # Scale to below the radix: a remainder would take three times as long.
        np.multiply(mixed, np.uint64(radices[0]), out=products)
        np.right_shift(products, np.uint64(32), out=products)
        mixed[:] = products
        np.add(left, mixed, out=left)
        # Modulo the radix: if the sum is below it, the difference wraps and is larger.
        np.subtract(left, np.uint32(radices[0]), out=buffer)
        np.minimum(left, buffer, out=left)
        left, right = right, left
        radices = radices[::-1]
    return left.astype(np.int64) * low + right


def _mix_hash(values: np.ndarray, buffer: np.ndarray) -> None:
    """Apply the finaliser of MurmurHash3 to uint32 values, in place."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        np.right_shift(values, np.uint32(shift), out=buffer)
        np.bitwise_xor(values, buffer, out=values)
        if factor is not None:
            np.multiply(values, np.uint32(factor), out=values)
