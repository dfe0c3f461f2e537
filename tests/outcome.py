"""Reads the files of a run, mostly without the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one for each line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the content of summary.json."""
    return json.loads((run_dir / "summary.json").read_text())


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl without the number of the sink, which depends on the sink size."""
    lines = read_lines(run_dir / "metrics.jsonl")
    return [{name: line[name] for name in line if name != "sink"} for line in lines]


def checkpoints(run_dir: Path) -> list[int]:
    """Return the steps of the complete checkpoints."""
    names = [folder.name for folder in (run_dir / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())


def arrays(run_dir: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint by path, by default of the newest."""
    step = max(checkpoints(run_dir)) if step is None else step
    folder = (make_checkpoint_path(run_dir / "checkpoints", step) / "state").absolute()
    with ocp.PyTreeCheckpointer() as reader:
        return reader.restore(folder)


def assert_equal_arrays(arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Assert the same paths with the same bits."""
    assert arrays.keys() == expected.keys()
    assert [path for path in arrays if not np.array_equal(arrays[path], expected[path])] == []


def assert_same_run(run_dir: Path, expected: Path) -> None:
    """Assert the same bits in every step, every evaluation and every checkpoint."""
    assert metrics(run_dir) == metrics(expected)
    assert read_lines(run_dir / "evals.jsonl") == read_lines(expected / "evals.jsonl")
    assert checkpoints(run_dir) == checkpoints(expected)
    for step in checkpoints(run_dir):
        assert_equal_arrays(arrays(run_dir, step), arrays(expected, step))
