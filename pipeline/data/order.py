"""The order of samples: shuffling, sharding, batching and repeating, as pure functions.

A pass is the whole dataset (or this run's shard of it), repeated `repeat` times; each repetition is
shuffled again and keys the randomness. Any step is reached without the steps before
it, so a resumed run continues exactly where it stopped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LARGE = 2**20
"""Samples from which on a whole shuffle is computed place by place, without a list of the pass."""


@lru_cache(maxsize=2)
def pass_order(
    seed: int, pass_: int, samples: int, shuffle: bool, buffer_size: int | None
) -> np.ndarray:
    """The sample at each position of a pass: a read-only permutation, int32 (samples,).

    A shuffle draws every sample from a buffer that is filled with the first `buffer_size` samples
    and refilled with the next in line; null or a buffer as large as the dataset shuffles it
    whole. Only raw Philox words are used, the one stream that numpy keeps stable (NEP 19).
    """
    if shuffle and samples > LARGE and (buffer_size or samples) >= samples:
        order = permuted(np.arange(samples), samples, seed, pass_).astype(np.int32)
    elif shuffle:
        words = np.random.Philox(key=np.array([seed, pass_], np.uint64)).random_raw(samples)
        order = _windowed_shuffle(words, min(buffer_size or samples, samples))
    else:
        order = np.arange(samples, dtype=np.int32)
    order.setflags(write=False)
    return order


def order_at(
    places: np.ndarray, seed: int, pass_: int, samples: int, shuffle: bool, buffer_size: int | None
) -> np.ndarray:
    """The samples at some positions of a pass: those of `pass_order`, like `places`.

    A pass of many samples that is not shuffled, or is shuffled whole, is never made.
    """
    if not shuffle:
        return places
    if samples > LARGE and (buffer_size or samples) >= samples:
        flat = permuted(places.ravel(), samples, seed, pass_)
        return flat.reshape(places.shape)
    return pass_order(seed, pass_, samples, shuffle, buffer_size)[places]


def _windowed_shuffle(words: np.ndarray, window: int) -> np.ndarray:
    """Draw from a buffer of `window` samples, one random 64-bit word a position.

    The bias of the modulo is below window / 2**64.
    """
    refills = words.size - window
    slots = (words[:refills] % window).astype(np.int64)
    # A draw finds what the draw before it from the same slot has put there: the next in line then.
    by_slot = np.argsort(slots, kind="stable")
    found = slots[by_slot]
    again = found[1:] == found[:-1]
    found[1:][again] = window + by_slot[:-1][again]
    drawn = np.empty(refills, np.int64)
    drawn[by_slot] = found
    buffer = np.arange(window)
    buffer[slots] = window + np.arange(refills)  # Of several the last one stays.
    drained = buffer[np.argsort(words[refills:], kind="stable")]
    return np.concatenate([drawn, drained]).astype(np.int32)


def shard_indices(samples: int, num_shards: int, shard_id: int) -> np.ndarray:
    """The positions of a pass that fall to a shard: shard_id, shard_id + num_shards, ...

    As in MindSpore's DistributedSampler: where the shards can't be equal, samples from the start of
    the pass fill them up, so that up to num_shards - 1 samples occur twice and none is missing.
    Returns int64 (ceil(samples / num_shards),).
    """
    return shard_positions(
        np.arange(shard_samples(samples, num_shards)), samples, num_shards, shard_id
    )


def shard_positions(places: np.ndarray, samples: int, num_shards: int, shard_id: int) -> np.ndarray:
    """The positions of a pass at these places of a shard, int64."""
    return (places.astype(np.int64) * num_shards + shard_id) % max(samples, 1)


def shard_samples(samples: int, num_shards: int) -> int:
    """The number of samples of each shard."""
    return -(-samples // num_shards)


@dataclass(frozen=True)
class Batching:
    """Numbers of batches of a pass. Raises ValueError where it would have none."""

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
                f"drop_remainder drops what is not full; the batch size can be {size} at most"
            )

    @property
    def shard_samples(self) -> int:
        """The number of samples of one repetition: those of one shard."""
        return shard_samples(self.samples, self.num_shards)

    @property
    def batches_per_repetition(self) -> int:
        """Batches in one repetition of the dataset, or of a shard of it."""
        full, rest = divmod(self.shard_samples, self.batch_size)
        return full + (rest > 0 and not self.drop_remainder)

    @property
    def short_batch(self) -> int:
        """The size of the shortest batch, where one is not full; else 0."""
        return 0 if self.drop_remainder else self.shard_samples % self.batch_size

    @property
    def steps_per_pass(self) -> int:
        """Batches in a pass, which reads the dataset `repeat` times."""
        return self.batches_per_repetition * self.repeat


@dataclass(frozen=True)
class Batches:
    """Sample indices of consecutive batches."""

    indices: np.ndarray
    """int32 (count, batch); a short batch is filled up with its first sample."""
    passes: np.ndarray
    """int32 (count,): pass * repeat + repetition, the `pass_` that keys random draws."""
    counts: np.ndarray
    """int32 (count,): the number of valid samples of each batch."""
    samples: int | None = None
    """Number of samples, where a pass may draw one several times: an index is that of the sample
    plus a multiple of this number, a key of its own for each draw. None: indices are samples."""

    @property
    def rows(self) -> np.ndarray:
        """The samples themselves, like `indices`."""
        return self.indices if self.samples is None else self.indices % self.samples


@dataclass(frozen=True, kw_only=True)
class SampleOrder(Batching):
    """The endless order of a split: the samples of each step."""

    seed: int
    shuffle: bool
    buffer_size: int | None
    shard_id: int = 0

    def batches(self, first_step: int, count: int) -> Batches:
        """The `count` batches that begin with global step `first_step`, the first step being 0."""
        steps = np.arange(first_step, first_step + count)
        passes, batch = np.divmod(steps, self.batches_per_repetition)
        positions = batch[:, None] * self.batch_size + np.arange(self.batch_size)
        mask = positions < self.shard_samples
        positions = np.where(mask, positions, positions[:, :1])
        indices = np.empty(positions.shape, np.int32)
        for pass_ in np.unique(passes):
            rows = passes == pass_
            indices[rows] = self._samples_at(int(pass_), positions[rows])
        return Batches(indices, passes.astype(np.int32), mask.sum(axis=1, dtype=np.int32))

    def reachable(self) -> np.ndarray:
        """The samples that any pass reads, int64: a shard that is not shuffled has but its own."""
        if self.num_shards > 1 and not self.shuffle:
            return shard_indices(self.samples, self.num_shards, self.shard_id)
        return np.arange(self.samples)

    def _samples_at(self, pass_: int, places: np.ndarray) -> np.ndarray:
        """The samples at some positions of a pass, int like `places`.

        A whole shuffle comes before sharding, so that a shard has other samples in every pass: it
        is the reader's (`shuffle=True`). One within a window comes after, as MindSpore's
        `shuffle(n)` follows the reader: a shard has the same samples in every pass.
        """
        if self.shuffle and self.buffer_size is not None:
            size = self.shard_samples
            drawn = order_at(places, self.seed, pass_, size, True, self.buffer_size)
            return self._positions(drawn)
        positions = self._positions(places)
        return order_at(positions, self.seed, pass_, self.samples, self.shuffle, None)

    def _positions(self, places: np.ndarray) -> np.ndarray:
        """The positions of the whole pass at these places of the shard, int64."""
        return shard_positions(places, self.samples, self.num_shards, self.shard_id)

    def _pass_order(self, pass_: int) -> np.ndarray:
        """The samples of a pass, in order, int (samples of the shard,)."""
        return self._samples_at(pass_, np.arange(self.shard_samples))


ROUNDS = 4
"""Rounds from which on a Feistel network of random functions is a random permutation (Luby and
Rackoff, SIAM Journal on Computing 17, 1988). Even, so that the halves end where they began."""


def permuted(places: np.ndarray, size: int, seed: int, number: int) -> np.ndarray:
    """The numbers at these places (n,) of a permutation of 0 to size - 1, int64 (n,).

    (seed, number) choose the permutation. It is a Feistel network over pairs of digits, of two
    radices whose product is hardly larger than `size`; what falls outside is permuted again until
    it is inside (Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002, sections 4
    and 5). Round keys are raw Philox words, the function of a round is the finaliser of
    MurmurHash3: mixed well enough for samples, and no cipher. Raises ValueError unless
    0 < size <= 2**32.
    """
    if not 0 < size <= 2**32:
        raise ValueError(f"a permutation of {size} numbers: must be 1 to 2**32")
    words = np.random.Philox(key=np.array([seed, number], np.uint64)).random_raw(ROUNDS)
    keys = [(np.uint32(word & 0xFFFFFFFF), np.uint32(word >> 32)) for word in words.tolist()]
    high = math.isqrt(size - 1) + 1
    low = -(-size // high)
    found = _network(places, high, low, keys)
    outside = np.flatnonzero(found >= size)
    while outside.size:
        found[outside] = _network(found[outside], high, low, keys)
        outside = outside[found[outside] >= size]
    return found


def _network(
    numbers: np.ndarray, high: int, low: int, keys: list[tuple[np.uint32, np.uint32]]
) -> np.ndarray:
    """Permute numbers below high * low, int (n,); int64 (n,)."""
    whole = numbers.astype(np.uint32)
    one = whole // np.uint32(low)
    other = whole - one * np.uint32(low)
    radices = high, low
    mixed, spare = np.empty_like(one), np.empty_like(one)
    wide = np.empty(one.shape, np.uint64)
    for first, second in keys:
        np.bitwise_xor(other, first, out=mixed)
        np.add(mixed, second, out=mixed)
        _mix(mixed, spare)
        # A number below the radix, in proportion: a remainder would take three times as long.
        np.multiply(mixed, np.uint64(radices[0]), out=wide)
        np.right_shift(wide, np.uint64(32), out=wide)
        mixed[:] = wide
        np.add(one, mixed, out=one)
        # Modulo the radix: below it the difference wraps round, and is the larger one.
        np.subtract(one, np.uint32(radices[0]), out=spare)
        np.minimum(one, spare, out=one)
        one, other, radices = other, one, radices[::-1]
    return one.astype(np.int64) * low + other


def _mix(values: np.ndarray, spare: np.ndarray) -> None:
    """The finaliser of MurmurHash3, 32 bits, in place."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        np.right_shift(values, np.uint32(shift), out=spare)
        np.bitwise_xor(values, spare, out=values)
        if factor is not None:
            np.multiply(values, np.uint32(factor), out=values)
