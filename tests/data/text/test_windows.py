"""Windows of a text against slices of it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.text.windows import (
    fit_best,
    make_window_columns,
    pack_documents,
    to_narrow_dtype,
)


@pytest.mark.medium
@given(st.integers(1, 9), st.integers(1, 12), st.data())
def test_labels_are_the_next_tokens(length: int, stride: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(length + 1, 80))
    tokens = np.random.default_rng(size).integers(0, 256, size)
    columns = make_window_columns(tokens, length, stride)
    starts = range(0, size - length, stride)
    read, after = columns["tokens"][:], columns["label"][:]
    assert read.shape == after.shape == columns["label"].shape == (len(starts), length)
    for window, start in enumerate(starts):
        assert read[window].ravel().tolist() == tokens[start : start + length].tolist()
        assert after[window].tolist() == tokens[start + 1 : start + length + 1].tolist()


def test_windows_are_read_at_any_indices() -> None:
    columns = make_window_columns(np.arange(20, dtype=np.int32), 4, 2)
    picked = columns["label"][np.array([3, 0, 3])]
    assert picked.tolist() == [[7, 8, 9, 10], [1, 2, 3, 4], [7, 8, 9, 10]]
    assert columns["tokens"][1:3].shape == (2, 4)


def test_text_shorter_than_a_window_is_refused() -> None:
    assert make_window_columns(np.zeros(5, np.int32), 4, 4)["tokens"].count == 1
    with pytest.raises(ValueError, match="4 tokens; a window needs 5"):
        make_window_columns(np.zeros(4, np.int32), 4, 4)


def test_tokens_are_stored_in_bytes_if_they_fit() -> None:
    assert to_narrow_dtype(np.arange(9), 256).dtype == np.uint8
    assert to_narrow_dtype(np.arange(9), 257).dtype == np.int32


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
