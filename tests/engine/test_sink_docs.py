"""The example of README.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

DOCUMENT = Path(__file__).parents[2] / "README.md"


@pytest.mark.medium
def test_example_runs_and_has_at_most_twelve_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 12
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    state = names["report"].state  # type: ignore[attr-defined]
    np.testing.assert_allclose(state, [1, 2, 3, 4], atol=1e-3)
    assert capsys.readouterr().out.startswith("500 ")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 500


@pytest.mark.medium
def test_example_prints_a_line_a_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """S-10."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert "steps=500," in code
    monkeypatch.chdir(tmp_path)
    exec(code.replace("steps=500,", "steps=500, size=100,"), {})
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split()[0] for line in lines if re.match(r"\d+ \d", line)]
    assert steps == ["100", "200", "300", "400", "500"]
