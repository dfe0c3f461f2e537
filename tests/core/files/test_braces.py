from __future__ import annotations

import json
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.files.braces import expand_braces
from tests.conftest import ROOT

GOLDEN = ROOT / "tests/golden/webdataset/read.json"
TEXTS = st.text(alphabet="ab0.", max_size=2)
NUMBERS = st.one_of(st.integers(0, 12).map(str), st.integers(0, 12).map("{:03}".format))
RANGES = st.tuples(NUMBERS, NUMBERS).map(lambda bounds: "{{{}..{}}}".format(*bounds))
CHOICES = st.lists(TEXTS, min_size=2, max_size=3).map(lambda texts: f"{{{','.join(texts)}}}")


def test_series_match_braceexpand_golden() -> None:
    series = json.loads(GOLDEN.read_text())["series"]
    for pattern, names in series.items():
        assert sorted(expand_braces(pattern)) == sorted(names)


@pytest.mark.medium
@given(st.lists(st.one_of(TEXTS, RANGES, CHOICES), min_size=1, max_size=4))
def test_names_match_bash(parts: list[str]) -> None:
    pattern = f"x{''.join(parts)}"
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {pattern}"], text=True, capture_output=True, check=True
    )
    assert expand_braces(pattern) == list(dict.fromkeys(printed.stdout.splitlines()))


@pytest.mark.parametrize("pattern", ["{0..999999999}", "{0..999}{0..999}", "{1,2}" * 9])
def test_too_many_names_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="must stand for at most 100,000 names"):
        expand_braces(pattern)
