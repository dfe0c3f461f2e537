"""What comparisons are made with."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import numpy
import pytest

from benchmarks import measure


def test_rounds_alternate_in_direction() -> None:
    turns: list[str] = []
    contestants = {name: lambda name=name: turns.append(name) or len(turns) for name in "abc"}
    results = measure.alternate(contestants, 3)
    assert "".join(turns) == "abccbaabc"
    assert results == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_machine_description_has_cores_and_memory() -> None:
    text = measure.machine()
    assert f"{len(os.sched_getaffinity(0))} cores" in text
    assert re.search(r"\d+ GiB", text)


def test_gpu_description_is_empty_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measure, "read_cuda_versions", lambda: {"driver": "580.1", "cudnn": "9.8.0"}
    )
    told = SimpleNamespace(stdout="NVIDIA H200, 580.1, 143771 MiB\n")
    monkeypatch.setattr(measure.subprocess, "run", lambda *_, **__: told)
    assert measure.gpus() == "NVIDIA H200, 580.1, 143771 MiB (cudnn 9.8.0)"
    assert "GiB, Linux" in measure.heading("t", "c", ())

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(measure.subprocess, "run", missing)
    assert measure.gpus() == ""


def test_versions_list_missing_packages() -> None:
    text = measure.versions(["numpy", "no-such-package"])
    assert f"numpy {numpy.__version__}" in text
    assert text.endswith("no-such-package not installed")


def test_table_is_markdown() -> None:
    rows = [["x", "1"], ["y", "2"]]
    assert measure.table(["name", "ms"], rows) == (
        "| name | ms |\n| --- | --- |\n| x | 1 |\n| y | 2 |\n"
    )
