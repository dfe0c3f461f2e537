"""Plain data are written as YAML that both readers read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.files.safe_yaml import parse_written_yaml, parse_yaml
from pipeline.core.files.yaml_text import format_yaml

ODD = ["=", "<<", "1_0", "0x1F", "yes", "1e3", "2020-01-01"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False)
    | st.text(max_size=12)
    | st.sampled_from(ODD)
)
PLAIN = st.recursive(
    SCALARS,
    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(max_size=5), of, max_size=3),
    max_leaves=12,
)


@pytest.mark.medium
@given(PLAIN)
def test_written_yaml_is_read_as_by_the_strict_reader(value: object) -> None:
    text = format_yaml(value)
    assert parse_written_yaml(text) == parse_yaml(text)
