"""Which layer of a file is which of a network, where layers are known by their order alone."""

from __future__ import annotations

import numpy as np


def align(fits: np.ndarray) -> list[int]:
    """For each of n layers of a file the place of its own among m of a network, both in order.

    `fits` (n, m) counts the arrays of a layer of the file that fit one of the network. Of all
    pairings that keep the order it is the one under which most arrays fit, then the one with most
    pairs, then the one that leaves out the last layers rather than others: a layer that is too
    many shifts none of those behind it, one of another shape stands for that in its place. Layers
    of the file without a partner get m, m + 1, ... Needleman and Wunsch, 1970, with free gaps.
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
    """(n + 1, m + 1): what the best pairing of the first i layers with the first j is worth."""
    theirs, ours = worth.shape
    best = np.zeros((theirs + 1, ours + 1), np.int64)
    for index in range(theirs):
        paired = best[index, :-1] + worth[index]
        best[index + 1, 1:] = np.maximum.accumulate(np.maximum(best[index, 1:], paired))
    return best
