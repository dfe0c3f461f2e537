"""Values and lists of them in messages."""

from __future__ import annotations

import pytest

from pipeline.core.files.value_text import align_columns, format_bytes, join_first


def test_omitted_texts_are_counted() -> None:
    assert join_first(["a", "b"], 2) == "a, b"
    assert join_first(["a", "b", "c"], 2, "; ", "; and ") == "a; b; and 1 more"
    assert join_first([str(n) for n in range(1003)], 2) == "0, 1 and 1,001 more"


def test_columns_are_aligned_without_trailing_spaces() -> None:
    rows = [("name", "n", "note"), ("a", "12", ""), ("bc", "3", "x")]
    assert align_columns(rows, right=(1,)) == ["name   n  note", "a     12", "bc     3  x"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e12, "2,500.0 GB")]
)
def test_byte_counts_have_a_decimal_unit(count: float, text: str) -> None:
    assert format_bytes(count) == text
