"""Windows of a text against slices of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.text.windows import make_window_columns, to_narrow_dtype


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


def test_windows_of_a_long_text_are_read_without_a_list_of_all() -> None:
    tokens = np.broadcast_to(np.uint8(7), (1 << 45,))
    column = make_window_columns(tokens, 4, 1)["label"]
    assert column[np.array([0, -1])].tolist() == [[7] * 4] * 2


def test_text_shorter_than_a_window_is_refused() -> None:
    assert make_window_columns(np.zeros(5, np.int32), 4, 4)["tokens"].count == 1
    with pytest.raises(ValueError, match="4 tokens; a window needs 5"):
        make_window_columns(np.zeros(4, np.int32), 4, 4)


def test_tokens_are_stored_in_bytes_if_they_fit() -> None:
    assert to_narrow_dtype(np.arange(9), 256).dtype == np.uint8
    assert to_narrow_dtype(np.arange(9), 257).dtype == np.int32
