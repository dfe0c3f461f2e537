"""Names of other tasks have a sentence, and similar names none."""

from __future__ import annotations

import pytest

from pipeline.core.files.name_text import explain_other_task


@pytest.mark.parametrize(
    "name", ["ppocket", "gateway", "vocal", "tt5", "cocoa", "fraud_detection", "x" * 1000]
)
def test_similar_names_are_of_no_other_task(name: str) -> None:
    assert explain_other_task(name) is None
