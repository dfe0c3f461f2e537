"""Elements that layouts store."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.ascend.chip.tasks import Layout
from pipeline.backends.ascend.compiler.buffers import count_padded_elements
from pipeline.backends.graph.graph import Value


@pytest.mark.parametrize(
    ("shape", "layout", "axis", "stored"),
    [
        ((2, 8, 8, 3), "NC1HWC0", 3, 2 * 8 * 8 * 16),
        ((2, 3, 8, 8), "NC1HWC0", 1, 2 * 16 * 8 * 8),
        ((2, 8, 8, 64), "NC1HWC0", 3, 2 * 8 * 8 * 64),
        ((30, 17), "FRACTAL_NZ", None, 32 * 32),
        ((17,), "FRACTAL_NZ", None, 17),
        ((7, 7, 3, 64), "FRACTAL_Z", None, 7 * 16 * 3 * 64),
        ((3, 3, 64, 64), "FRACTAL_Z", None, 9 * 64 * 64),
        ((30, 17), "ND", None, 30 * 17),
        ((), "ND", None, 1),
    ],
)  # fmt: skip
def test_padded_elements_match_the_layout(
    shape: tuple[int, ...], layout: Layout, axis: int | None, stored: int
) -> None:
    assert count_padded_elements(Value(shape, "float16"), layout, axis) == stored


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=4),
    st.sampled_from(["ND", "NC1HWC0", "FRACTAL_NZ", "FRACTAL_Z"]),
)
def test_padding_never_loses_elements(sides: list[int], layout: Layout) -> None:
    stored = count_padded_elements(Value(tuple(sides), "float16"), layout, len(sides) - 1)
    assert math.prod(sides) <= stored <= math.prod(sides) * 256
