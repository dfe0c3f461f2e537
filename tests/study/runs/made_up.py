"""Run directories that were never run: the files of a run, with chosen keys and results."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from pipeline.core.files.yaml_text import format_yaml

RECIPE: dict[str, Any] = {
    "name": "made_up",
    "seed": 1,
    "dataset": {
        "name": "digits",
        "root": None,
        "train": {"ops": [{"name": "resize", "size": [32, 32]}, {"name": "rescale"}]},
    },
    "model": {"name": "mlp", "hidden": [16]},
    "train": {
        "batch_size": 32,
        "optimizer": {"name": "momentum", "lr": 0.1},
        "precision": "float32",
    },
    "checkpoint": {"restore": None, "every_steps": 100},
}


def make_run(
    folder: Path,
    *,
    lr: float = 0.1,
    hidden: int = 16,
    accuracy: float | None = 0.9,
    status: str | None = "done",
    steps: int = 100,
    restore: str | None = None,
    name: str = "made_up",
) -> Path:
    """Write a run directory; `status` None leaves out the summary, as a killed run does."""
    folder.mkdir(parents=True)
    recipe = json.loads(json.dumps({**RECIPE, "name": name}))
    recipe["train"]["optimizer"]["lr"] = lr
    recipe["model"]["hidden"] = [hidden]
    recipe["checkpoint"]["restore"] = restore
    (folder / "recipe.yaml").write_text(format_yaml(recipe))
    lines = (
        json.dumps({"step": step, "epoch": 1, "loss": 2 / (1 + lr * step), "learning_rate": lr})
        for step in range(1, steps + 1)
    )
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if accuracy is not None:
        evaluation = {
            "step": steps,
            "accuracy": accuracy,
            "f1": {"macro": accuracy / 2},
            "count": 9,
        }
        (folder / "evals.jsonl").write_text(json.dumps(evaluation) + "\n")
    if status is not None:
        summary = {
            "status": status,
            "steps": steps,
            "parameters": 64 * hidden,
            "metrics": {} if accuracy is None else {"accuracy": accuracy, "f1": {"macro": 0.5}},
            "time": {"step_ms": 1.5, "train_s": steps * 0.0015},
            "resumed_from": None,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    process = {
        "begun": "2026-11-22T10:00:00+00:00",
        "folder": str(folder.parent),
        "code": {"git": {"commit": "0123456789abcdef", "dirty": False}},
        "data": {"train": {"image": {"sha256": "ab" * 32}}},
    }
    (folder / "provenance.json").write_text(json.dumps({"processes": [process]}))
    return folder


def make_study(root: Path, runs: int, *, steps: int = 100, seed: int = 0) -> None:
    """Write runs whose accuracy hangs on the learning rate alone, best at 0.03."""
    generator = random.Random(seed)
    for number in range(runs):
        lr = 10 ** generator.uniform(-4, 0)
        miss = abs(generator.gauss(0, 0.005))
        accuracy = max(0.1, 0.98 - 0.15 * abs(_decades(lr / 0.03)) - miss)
        make_run(
            root / f"{number:04d}_made_up",
            lr=lr,
            hidden=generator.choice([16, 32, 64]),
            accuracy=accuracy,
            steps=steps,
        )


def _decades(ratio: float) -> float:
    from math import log10

    return log10(ratio)
