"""Runs that are written, not trained, for tests of what judges them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.study.expect.sides import CodeSide

HERE = {"processor": "here", "instructions": "avx"}


def write_run(
    run_dir: Path,
    losses: Iterable[float],
    metrics: Mapping[str, Any] | None = None,
    step_ms: float = 1.0,
    machine: Mapping[str, str] = HERE,
) -> Path:
    """Write the files of a run that are compared."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    summary = {"status": "done", "metrics": dict(metrics or {}), "time": {"step_ms": step_ms}}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    processes = [{"machine": machine, "versions": {"jax": "0.10"}, "settings": {}}]
    (run_dir / "provenance.json").write_text(json.dumps({"processes": processes}))
    (run_dir / "recipe.yaml").write_text("name: mine\n")
    return run_dir


@dataclass(frozen=True)
class WrittenSide(CodeSide):
    """A side whose runs are written by a function of the seed."""

    write: Callable[[Path, int], object]

    def train(self, name: str, keys: Sequence[str], run_dir: Path) -> None:
        self.write(run_dir, 1)

    def train_seeds(
        self, name: str, keys: Sequence[str], seeds: Sequence[int], folder: Path
    ) -> dict[int, Path]:
        for seed in seeds:
            self.write(folder / str(seed), seed)
        return {seed: folder / str(seed) for seed in seeds}


def make_side(write: Callable[[Path, int], object], label: str = "other") -> WrittenSide:
    return WrittenSide(label, Path(), Path(), write)
