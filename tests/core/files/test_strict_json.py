"""JSON that any parser reads: numbers that it has no form for become null."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import RunError
from pipeline.core.files.strict_json import format_json, write_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.medium
@given(value=values)
def test_json_round_trips_with_null_for_nan_and_infinities(value: Any) -> None:
    assert json.loads(format_json(value), parse_constant=refuse) == without_nan(value)


def test_tuples_are_lists_and_an_indent_makes_lines() -> None:
    assert format_json((1.5, math.nan), indent=1) == "[\n 1.5,\n null\n]"


def test_unwritable_file_is_a_run_error(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert (tmp_path / "a.json").read_text() == '{\n "loss": null\n}\n'
    with pytest.raises(RunError, match=r"missing/a\.json: can't be written: No such file"):
        write_json(tmp_path / "missing" / "a.json", {})
