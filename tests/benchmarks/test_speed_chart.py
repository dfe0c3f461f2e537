"""The chart and the table of README are those of the committed results."""

from __future__ import annotations

import re

import pytest

from benchmarks.speed_chart import (
    CHART,
    CONTESTANTS,
    RESULTS,
    ROOT,
    TASKS,
    StepTimes,
    draw_chart,
    draw_results,
    read_step_times,
)


def read_results(task: str) -> StepTimes:
    return read_step_times((RESULTS / f"train_{task}_float32.md").read_text(encoding="utf-8"))


def test_committed_chart_is_that_of_the_results() -> None:
    command = "python -m benchmarks.speed_chart"
    assert CHART.read_text(encoding="utf-8") == draw_results(), f"drawn again by {command}"


def test_bars_are_as_long_as_the_medians() -> None:
    text = (
        "2026-01-02; Some CPU (family 1, model 2), 4 cores, avx2; Python\n\n"
        "| contestant | ms/step, median |\n| --- | --- |\n| ours | 2.000 |\n"
        "| ours, dispatches alone | 1 |\n| torch: PyTorch eager | 5.000 |\n\n"
        "| contestant | 1 |\n| --- | --- |\n| ours | 9 |\n"
    )
    times = read_step_times(text)
    assert times == StepTimes(
        {"ours": 2.0, "ours, dispatches alone": 1.0, "torch": 5.0},
        "2026-01-02",
        "4 cores of Some CPU",
    )
    chart = draw_chart({"mlp": times})
    bars = [bar for bar in chart.marks.iter("rect") if bar.find("title") is not None]
    ours, torch = (float(bar.get("width", "nan")) for bar in bars)
    assert torch == pytest.approx(2.5 * ours)
    words = [text.text for text in chart.marks.iter("text")]
    assert {"2 ms", "2.5x"} < set(words)
    assert "4 cores of Some CPU, 2026-01-02, float32, medians of alternating rounds" in words


def test_table_of_readme_is_that_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"]({CHART.relative_to(ROOT)})" in readme
    section = readme.partition("## Speed")[2].partition("##")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    for task, row in zip(TASKS, rows[2:], strict=True):
        times = read_results(task)
        assert f"{times.machine}, {times.date}" in section
        number, unit = row[1].split()
        ours_ms = times.medians_ms["ours"]
        assert float(number) * {"ms": 1, "s": 1000}[unit] == pytest.approx(ours_ms, rel=0.01)
        ratios = [
            f"{times.medians_ms[name] / ours_ms:.1f}x" if name in times.medians_ms else ""
            for name in list(CONTESTANTS)[1:]
        ]
        assert row[2:] == ratios


def test_readme_says_what_to_do_within_a_screen() -> None:
    """What it is, a picture, how to install, run and test."""
    first = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:30]
    text = "\n".join(first)
    for part in (
        "A JAX training pipeline",
        "![",
        "pip install -e .",
        "python -m pipeline",
        "pytest",
    ):
        assert part in text
    assert len(re.findall(r"!\[", text)) == 1
