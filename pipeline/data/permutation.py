"""A permutation of many numbers that is computed place by place, in no memory."""

from __future__ import annotations

import numpy as np

ROUNDS = 8


def permuted(places: np.ndarray, size: int, seed: int, number: int) -> np.ndarray:
    """The numbers at these places of a permutation of 0 to size - 1, int64 like `places`.

    (seed, number) choose the permutation. It is a Feistel network over the bits of a number, whose
    halves may differ by one bit; what falls outside is permuted again until it is inside (Black and
    Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002, section 4). Round keys are raw
    Philox words, the function of a round is the finaliser of MurmurHash3: mixed well enough for
    samples, and no cipher. Raises ValueError unless 0 < size <= 2**32.
    """
    if not 0 < size <= 2**32:
        raise ValueError(f"a permutation of {size} numbers: must be 1 to 2**32")
    words = np.random.Philox(key=np.array([seed, number], np.uint64)).random_raw(ROUNDS)
    keys = [(np.uint32(word & 0xFFFFFFFF), np.uint32(word >> 32)) for word in words.tolist()]
    bits = max(size - 1, 1).bit_length()
    found = _network(places, bits, keys)
    while (outside := found >= size).any():
        found[outside] = _network(found[outside], bits, keys)
    return found


def _network(numbers: np.ndarray, bits: int, keys: list[tuple[np.uint32, np.uint32]]) -> np.ndarray:
    """Permute numbers of `bits` bits, int64 (n,)."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    high = (numbers >> low_bits).astype(np.uint32)
    low = (numbers & ((1 << low_bits) - 1)).astype(np.uint32)
    for first, second in keys:
        mixed = _mix((low ^ first) + second)
        mixed &= np.uint32((1 << high_bits) - 1)
        mixed ^= high
        high, low = low, mixed
        high_bits, low_bits = low_bits, high_bits
    # An even number of rounds: the halves have their first widths again.
    return (high.astype(np.int64) << low_bits) | low.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of MurmurHash3, 32 bits, in place."""
    values ^= values >> np.uint32(16)
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    values ^= values >> np.uint32(16)
    return values
