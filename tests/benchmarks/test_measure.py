"""What comparisons are made with."""

from __future__ import annotations

import os
import re

import numpy

from benchmarks import measure


def test_rounds_alternate_and_every_other_runs_backwards() -> None:
    turns: list[str] = []
    contestants = {name: lambda name=name: turns.append(name) or len(turns) for name in "abc"}
    results = measure.alternate(contestants, 3)
    assert "".join(turns) == "abccbaabc"
    assert results == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_the_machine_is_described_by_what_decides() -> None:
    text = measure.machine()
    assert f"{len(os.sched_getaffinity(0))} cores" in text
    assert re.search(r"\d+ GiB", text)


def test_versions_say_what_is_not_installed() -> None:
    text = measure.versions(["numpy", "no-such-package"])
    assert f"numpy {numpy.__version__}" in text
    assert text.endswith("no-such-package not installed")


def test_a_table_is_markdown() -> None:
    rows = [["x", "1"], ["y", "2"]]
    assert measure.table(["name", "ms"], rows) == (
        "| name | ms |\n| --- | --- |\n| x | 1 |\n| y | 2 |\n"
    )
