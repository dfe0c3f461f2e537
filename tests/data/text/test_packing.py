"""Packing of documents: no label is lost, and pieces fit best."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pipeline.data.text.packing import fit_best, pack_documents


def test_documents_are_packed_without_losing_a_label() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 200, size).astype(np.uint8) for size in (5, 30, 1, 2, 9, 17, 0)]
    packed = pack_documents(documents, 8, -7)
    tokens, numbers, label = (packed.columns[name] for name in ("tokens", "document", "label"))
    assert (packed.documents, packed.pieces) == (5, 1 + 4 + 1 + 1 + 2)
    assert (tokens.dtype, numbers.dtype, label.dtype) == (np.uint8, np.int32, np.int32)
    pairs = sorted(zip(tokens[numbers > 0].tolist(), label[numbers > 0].tolist(), strict=True))
    expected = sorted(pair for d in documents for pair in pairwise(d.tolist()))
    assert pairs == expected
    assert set(label[numbers == 0]) <= {-7}
    assert packed.padding == pytest.approx(1 - len(expected) / tokens.size)
    assert packed.padding_alone == pytest.approx(1 - len(expected) / (9 * 8))
    # Inside of a document, the label of a token is the token after it.
    is_same = numbers[:, 1:] == numbers[:, :-1]
    inside = is_same & (numbers[:, 1:] > 0)
    np.testing.assert_array_equal(tokens[:, 1:][inside], label[:, :-1][inside])


def test_each_piece_goes_into_the_fullest_window_with_room() -> None:
    """Against a search over all windows."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        sizes = rng.integers(1, 13, 60)
        windows, starts = fit_best(sizes, 12)
        used: list[int] = []
        for piece in np.argsort(-sizes, kind="stable"):
            fitting = [use for use in used if use + sizes[piece] <= 12]
            start = max(fitting, default=0)
            assert starts[piece] == start
            if fitting:
                used[used.index(start)] += sizes[piece]
            else:
                used.append(int(sizes[piece]))
        assert sorted(np.bincount(windows, sizes)) == sorted(used)
        for window in range(len(used)):
            places = [
                place
                for piece in np.flatnonzero(windows == window)
                for place in range(starts[piece], starts[piece] + sizes[piece])
            ]
            assert sorted(places) == list(range(len(places)))


def test_documents_of_one_token_have_nothing_to_predict() -> None:
    with pytest.raises(ValueError, match="no document of two tokens"):
        pack_documents([np.zeros(1, np.uint8)], 8, -1)
