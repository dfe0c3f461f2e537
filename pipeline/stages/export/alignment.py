"""Alignment of a file's layers with those of a network, where only their order is known."""

from __future__ import annotations

import numpy as np


def align(fits: np.ndarray) -> list[int]:
    """For each of a file's n layers, the index of its partner among a network's m layers.

    `fits`, int (n, m), counts the arrays of a layer of the file that fit one of the network. Among
    all pairings that keep the order, the result maximises first the number of fitting arrays, then
    the number of pairs, and then leaves the last layers unpaired: an extra layer does not shift the
    pairs after it, and a layer of another shape is paired with the one in its position. Unpaired
    layers of the file get m, m + 1, ... Needleman and Wunsch, 1970, with free gaps.
    """
    ours = fits.shape[1]
    worth = fits.astype(np.int64) * (min(fits.shape) + 1) + 1
    best = _best(worth)
    partners: list[int | None] = [None] * len(fits)
    theirs, place = len(fits), ours
    while theirs and place:
        if best[theirs, place] == best[theirs - 1, place]:
            theirs -= 1
        elif best[theirs, place] == best[theirs, place - 1]:
            place -= 1
        else:
            theirs, place = theirs - 1, place - 1
            partners[theirs] = place
    alone = iter(range(ours, ours + len(fits)))
    return [next(alone) if partner is None else partner for partner in partners]


def _best(worth: np.ndarray) -> np.ndarray:
    """The score, (n + 1, m + 1), of the best pairing of the first i layers with the first j."""
    theirs, ours = worth.shape
    best = np.zeros((theirs + 1, ours + 1), np.int64)
    for index in range(theirs):
        paired = best[index, :-1] + worth[index]
        best[index + 1, 1:] = np.maximum.accumulate(np.maximum(best[index, 1:], paired))
    return best
