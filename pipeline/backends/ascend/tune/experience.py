"""Rules of experience about tilings, which cost less than to price them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CORE_FRACTALS = 64
"""Fewest products of fractals that are worth starting a core for."""
DEPTH_FACTOR = 2.0
"""Cost of splitting the depth, whose sums must be added in memory, if cores can share the rest."""


def rate_tilings(
    limits: Sequence[int], cores_count: float, rows: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the expected cost of each tiling relative to an ideal one, from rows (tilings, 6).

    `limits` are the batch, m, k and n of the product, in fractals. As many cores as are worth it
    should be busy, with equal parts, and parts should be multiples of their blocks. Each row of a
    block is loaded again for its columns and the reverse, so square blocks load least. The depth
    should be split only if there is nothing else to share.
    """
    sizes = np.array(limits, dtype=np.float64)
    cores = rows[:, :4]
    parts = np.ceil(sizes / cores)
    part_padding = (parts * cores).prod(axis=1) / sizes.prod()
    sides = parts[:, [1, 3]]
    blocks = np.minimum(rows[:, 4:], sides)
    block_padding = (np.ceil(sides / blocks) * blocks / sides).prod(axis=1)
    loads = 1 + (1 / blocks).sum(axis=1)
    useful_cores = np.clip(sizes.prod() / CORE_FRACTALS, 1, cores_count)
    used_cores = cores.prod(axis=1)
    mismatch = np.maximum(used_cores / useful_cores, useful_cores / used_cores)
    can_share = sizes[[0, 1, 3]].prod() >= useful_cores
    depth = np.where(can_share & (rows[:, 2] > 1), DEPTH_FACTOR, 1.0)
    return np.asarray(part_padding * block_padding * loads * mismatch * depth)
