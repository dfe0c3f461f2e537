"""A permutation of many numbers that is computed place by place, in no memory."""

from __future__ import annotations

import math

import numpy as np

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
