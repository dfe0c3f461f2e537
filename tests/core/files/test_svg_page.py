"""Drawing helpers of a page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.files.svg_page import ticks


@given(st.floats(1e-3, 1e9))
def test_ticks_are_few_even_and_within_the_axis(end: float) -> None:
    marks = ticks(end)
    assert 3 <= len(marks) <= 9
    assert marks[0] == 0
    assert marks[-1] <= end * (1 + 1e-6)
    assert marks[1] * (len(marks) - 1) == pytest.approx(marks[-1])
