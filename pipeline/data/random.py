"""Counter-based random numbers, which are a pure function of a key and a counter.

All functions return the same bits with numpy and jax.numpy. So a batch is augmented in the same way
on the host, in the compiled step, and after a resume.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Words = tuple[Any, Any]
"""The two uint32 words of a number: two arrays that broadcast to one shape, or numpy scalars."""
MAX_SEED = 2**63 - 1
"""The largest signed integer of 64 bits."""
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
"""Constants of Threefry-2x32."""
_OPS_STREAM = 1 << 31
"""Added to an op's number in the counter that its key is encrypted from. jax.random uses the same
cipher, but with small numbers, so map ops share no bits with initial weights or dropout masks."""
_CHOICE_OP = (1 << 30) + 1
"""Op number in the key that draws a step's variant, larger than any index of a map op."""


def seed_words(seed: int) -> np.ndarray:
    """Return the lower and the upper word of a seed, uint32 (2,), since compiled programs have no
    64-bit integers. Raises ValueError for a seed outside 0..2**63 - 1."""
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed = {seed}: must be a whole number from 0 to {MAX_SEED}")
    return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)


def encrypt_threefry(key: Words, counter: Words) -> Words:
    """Return `counter` encrypted by Threefry-2x32 with 20 rounds (Salmon et al., SC'11)."""
    subkeys = (*key, key[0] ^ key[1] ^ _PARITY)
    left = counter[0] + subkeys[0]
    right = counter[1] + subkeys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left = left + right
            right = left ^ (right << rotation | right >> (32 - rotation))
        left = left + subkeys[(group + 1) % 3]
        right = right + subkeys[(group + 2) % 3] + np.uint32(group + 1)
    return left, right


def uniforms(xp: Any, seed: Any, epoch: Any, sample: Any, op: int, draws: int) -> Any:
    """Return uniform random numbers in [0, 1), multiples of 2**-24, float32 (batch, draws).

    `seed` has the uint32 words of `seed_words`, `sample` the sample indices (batch,), `epoch` the
    epoch of each sample, (batch,) or a scalar. `op` is the position of the op in the recipe's list.
    The key of the cipher is derived from seed, epoch and op. The sample and the number of a pair of
    draws are the counter, so no two draws share bits, and none depends on the number of draws.
    """
    sample = xp.asarray(sample).astype(np.uint32)[:, None]
    if draws == 0:
        return xp.zeros((sample.shape[0], 0), np.float32)
    epoch = xp.asarray(epoch).astype(np.uint32).reshape(-1, 1)
    key = encrypt_threefry((seed[:1], seed[1:]), (epoch, np.uint32(_OPS_STREAM + op)))
    pairs = np.arange((draws + 1) // 2, dtype=np.uint32)
    words = xp.stack(encrypt_threefry(key, (sample, pairs)), axis=-1)
    words = words.reshape(sample.shape[0], 2 * pairs.size)[:, :draws]
    # float32 can hold integers of 24 bits exactly.
    return (words >> 8).astype(np.float32) * np.float32(2**-24)


def scale_to_integers(xp: Any, values: Any, bound: Any) -> Any:
    """Scale values of `uniforms` to integers 0 to bound - 1, int32; `bound` is at most 2**24."""
    return xp.floor(values * bound).astype(np.int32)


def draw_choice(xp: Any, choices: int, seed: Any, step: Any) -> Any:
    """Return a whole number from 0 to `choices` - 1, int32 (), a pure function of (seed, step)."""
    draws = uniforms(xp, seed, np.int32(0), xp.asarray(step).reshape(1), _CHOICE_OP, 1)
    return scale_to_integers(xp, draws, choices)[0, 0]
