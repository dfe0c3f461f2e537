"""Best-fit offsets for blocks of memory with known lifetimes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

Fit = Literal["best", "lowest"]
FITS: tuple[Fit, ...] = ("best", "lowest")
ORDERS = ("size", "area")
CLOSE = 0.005
"""Other heuristics are tried only to save more than this share of memory."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are in use from the start of task `birth` to the end of task `death - 1`."""

    nbytes: int
    birth: int
    death: int


@dataclass(frozen=True)
class Packing:
    """An offset for every block, and the extent of all blocks in bytes."""

    offsets: tuple[int, ...]
    extent_bytes: int
    heuristic: str


def live_bytes(blocks: Iterable[Block], tasks: int) -> np.ndarray:
    """Return the bytes live during each of `tasks` tasks: int64, shape (tasks,)."""
    change = np.zeros(tasks + 1, np.int64)
    for block in blocks:
        change[block.birth] += block.nbytes
        change[block.death] -= block.nbytes
    return np.cumsum(change[:tasks])


def pack(blocks: tuple[Block, ...], bound_bytes: int) -> Packing:
    """Return offsets at which no two blocks that live together overlap.

    Blocks are placed from the largest down, each in the tightest gap between the placed ones that
    it conflicts with, as MindSpore's SOMAS does. Other orders and the lowest gap are tried while
    the extent is not `CLOSE` to `bound_bytes`, the most bytes that are live at once; the best is
    kept.
    """
    table = np.array([(b.nbytes, b.birth, b.death) for b in blocks], np.int64).reshape(-1, 3)
    best: Packing | None = None
    nbytes, birth, death = table.T
    for order, fit in product(ORDERS, FITS):
        limit = None if best is None else best.extent_bytes
        weight = nbytes if order == "size" else nbytes * (death - birth)
        offsets = _place(table, np.argsort(-weight, kind="stable"), fit, limit)
        if offsets is not None:
            extent = int((offsets + nbytes).max(initial=0))
            best = Packing(tuple(offsets.tolist()), extent, f"{order}, {fit} fit")
        if best is not None and best.extent_bytes <= bound_bytes * (1 + CLOSE):
            break
    assert best is not None, "the first heuristic has no limit to fail at"
    return best


def _place(table: np.ndarray, order: np.ndarray, fit: Fit, limit: int | None) -> np.ndarray | None:
    """Return offsets of the blocks, or None once they reach `limit`.

    `placed` has a column (start, end, birth, death) for every placed block, by ascending start; its
    first one stands for address 0 and conflicts with all.
    """
    offsets = np.zeros(len(table), np.int64)
    placed = np.zeros((4, len(table) + 1), np.int64)
    placed[3, 0] = np.iinfo(np.int64).max
    placed[2, 0] = -1
    rows = table.tolist()
    for count, index in enumerate(order.tolist(), start=1):
        nbytes, birth, death = rows[index]
        starts, ends, births, deaths = placed[:, :count]
        rivals = ((births < death) & (deaths > birth)).nonzero()[0]
        offset = _fit(starts.take(rivals), ends.take(rivals), nbytes, fit)
        if limit is not None and offset + nbytes >= limit:
            return None
        offsets[index] = offset
        at = int(starts.searchsorted(offset, side="right"))
        placed[:, at + 1 : count + 1] = placed[:, at:count]
        placed[:, at] = (offset, offset + nbytes, birth, death)
    return offsets


def _fit(starts: np.ndarray, ends: np.ndarray, nbytes: int, fit: Fit) -> int:
    """Return the offset for a block among its rivals, which are sorted by ascending start."""
    tops = np.maximum.accumulate(ends)
    gaps = starts[1:] - tops[:-1]
    wide = (gaps >= nbytes).nonzero()[0]
    if not wide.size:
        return int(tops[-1])
    return int(tops[wide[gaps[wide].argmin()] if fit == "best" else wide[0]])


def find_overlap(blocks: tuple[Block, ...], offsets: tuple[int, ...]) -> tuple[int, int] | None:
    """Return two blocks that live together and overlap, or None.

    Walks through time with the live blocks by address, independently of how offsets were found: as
    long as nothing overlaps, a new block can only run into its neighbours.
    """
    born = [(b.birth, 1, i) for i, b in enumerate(blocks) if b.death > b.birth and b.nbytes]
    died = [(b.death, 0, i) for i, b in enumerate(blocks) if b.death > b.birth and b.nbytes]
    live: list[tuple[int, int, int]] = []
    for _, is_birth, index in sorted(born + died):
        span = (offsets[index], offsets[index] + blocks[index].nbytes, index)
        at = bisect_left(live, span)
        if not is_birth:
            del live[at]
            continue
        for start, end, other in live[max(at - 1, 0) : at + 1]:
            if start < span[1] and span[0] < end:
                return min(index, other), max(index, other)
        insort(live, span)
    return None
