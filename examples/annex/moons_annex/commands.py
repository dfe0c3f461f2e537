"""The command `best-loss`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(short_help="the step with the smallest loss of a run")
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def best_loss(run_dir: Path) -> None:
    """Print the step of a run with the smallest loss."""
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    best = min(map(json.loads, lines), key=lambda line: line["loss"])
    print(f"step {best['step']}: loss {best['loss']:.4f}")
