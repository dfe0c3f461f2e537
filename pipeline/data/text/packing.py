"""Packing of documents into windows of tokens, several in a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.data.inputs import DOCUMENT


@dataclass(frozen=True)
class PackedWindows:
    """Documents in windows: the columns of a split, and how full they are."""

    columns: dict[str, np.ndarray]
    """`tokens` uint8 or int32, `label` int32 and `DOCUMENT` int32, all (windows, length)."""
    documents: int
    """Number of documents that have a label."""
    pieces: int
    """Number of pieces of these documents, of at most a window each."""

    @property
    def padding(self) -> float:
        """The share of places without a token."""
        return float((self.columns[DOCUMENT] == 0).mean())

    @property
    def padding_alone(self) -> float:
        """The same share if each piece had a window."""
        windows = len(self.columns[DOCUMENT])
        return 1 - (1 - self.padding) * windows / self.pieces


def pack_documents(
    documents: Sequence[np.ndarray], length: int, ignored_label: int
) -> PackedWindows:
    """Pack the tokens of documents, uint8 or int32 (tokens,) each, into windows.

    The label of a token is the next token of its document, so a document's last token is only a
    label. A document of more than `length` + 1 tokens is cut into pieces, each of which begins with
    the last label of the piece before. Places without a token have token 0 and `ignored_label`.
    Raises ValueError without a document of two tokens.
    """
    pieces = [
        document[first : first + length + 1]
        for document in documents
        for first in range(0, len(document) - 1, length)
    ]
    if not pieces:
        raise ValueError("no document of two tokens, so that there is nothing to predict")
    sizes = np.array([len(piece) - 1 for piece in pieces])
    windows, starts = fit_best(sizes, length)
    shape = int(windows.max()) + 1, length
    tokens = np.zeros(shape, pieces[0].dtype)
    label = np.full(shape, ignored_label, np.int32)
    numbers = np.zeros(shape, np.int32)
    # The number of a piece is read from the place before it.
    for index in np.argsort(starts, kind="stable").tolist():
        window, start = windows[index], starts[index]
        place = slice(start, start + sizes[index])
        tokens[window, place] = pieces[index][:-1]
        label[window, place] = pieces[index][1:]
        numbers[window, place] = numbers[window, start - 1] + 1 if start else 1
    has_label = sum(len(document) > 1 for document in documents)
    columns = {"tokens": tokens, DOCUMENT: numbers, "label": label}
    return PackedWindows(columns, has_label, len(pieces))


def fit_best(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the window of each piece, and the place in it, both int64 (pieces,). `sizes` are int
    (pieces,), 1 to `length`.

    The largest piece comes first, and each goes into the fullest window with room, or a new one
    (best-fit decreasing: Ding et al. 2024, arXiv 2404.10830, section 3).
    """
    windows, starts = np.empty((2, len(sizes)), np.int64)
    open_windows: list[list[int]] = [[] for _ in range(length + 1)]
    """Windows by their room."""
    rooms = 0
    """Bit r is set if a window has room r."""
    count = 0
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            window = open_windows[room].pop()
            if not open_windows[room]:
                rooms ^= 1 << room
        else:
            room, window, count = length, count, count + 1
        windows[piece], starts[piece] = window, length - room
        if room > size:
            open_windows[room - size].append(window)
            rooms |= 1 << (room - size)
    return windows, starts
