"""The table of `benchmarks.sink`: medians over the rounds, against the row without sinks."""

from __future__ import annotations

import sys

import pytest

from benchmarks import sink


def test_sink_rows_are_medians_relative_to_single_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, list[str], str]] = []

    def measure(recipe: str, overrides: list[str], size: str, steps: int) -> tuple[float, float]:
        asked.append((recipe, overrides, size))
        turn = sum(size == other for _, _, other in asked)
        return (8.0 if size == "off" else 2.0) * turn, 1.0

    monkeypatch.setattr(sink, "_measure", measure)
    monkeypatch.setattr(sys, "argv", ["sink", "--steps=5", "--rounds=3", "train.batch_size=16"])
    sink.main()
    said = capsys.readouterr().out
    command = "python -m benchmarks.sink --recipe lenet5_digits --steps 5 train.batch_size=16"
    assert f"\n    {command}\n" in said
    assert "Medians of 3 rounds." in said
    assert "| off | 16.000 | 1.00x | 1.000 |" in said
    assert "| 1000 | 4.000 | 4.00x | 1.000 |" in said
    assert {size for *_, size in asked} == {*sink.SINKS}
    assert all("train.batch_size=16" in overrides for _, overrides, _ in asked)
