"""What a run left behind, read without the package's help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path


def read_lines(file: Path) -> list[dict[str, Any]]:
    """A file of JSON objects, one a line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_summary(run_dir: Path) -> dict[str, Any]:
    """summary.json."""
    return json.loads((run_dir / "summary.json").read_text())


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the number of the sink, which is all that depends on its size."""
    lines = read_lines(run_dir / "metrics.jsonl")
    return [{name: line[name] for name in line if name != "sink"} for line in lines]


def checkpoints(run_dir: Path) -> list[int]:
    """The steps of the complete checkpoints there are."""
    names = [folder.name for folder in (run_dir / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())


def arrays(run_dir: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint by path; of the newest one unless a step is given."""
    step = max(checkpoints(run_dir)) if step is None else step
    folder = (make_checkpoint_path(run_dir / "checkpoints", step) / "state").absolute()
    with ocp.PyTreeCheckpointer() as reader:
        return reader.restore(folder)


def assert_equal_arrays(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """The same paths with the same bits."""
    assert one.keys() == other.keys()
    assert [path for path in one if not np.array_equal(one[path], other[path])] == []


def assert_same_run(one: Path, other: Path) -> None:
    """Every step, every evaluation and every checkpoint that both kept, bit for bit."""
    assert metrics(one) == metrics(other)
    assert read_lines(one / "evals.jsonl") == read_lines(other / "evals.jsonl")
    assert checkpoints(one) == checkpoints(other)
    for step in checkpoints(one):
        assert_equal_arrays(arrays(one, step), arrays(other, step))
