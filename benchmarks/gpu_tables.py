"""Tables of the runs that `benchmarks/first_gpu.sh` left in a folder.

python -m benchmarks.gpu_tables OUT
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import heading, table

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")
HEADER = ("run", "status", "device", "steps", "ms/step, median", "images/s", "compile, s", "loss")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(tables(parser.parse_args().folder))


def tables(folder: Path) -> str:
    """Markdown: the runs, which of them are equal, the sinks, and what failed."""
    summaries = sorted(folder.glob("*/summary.json"), key=lambda file: file.stat().st_mtime)
    rows = [_row(file.parent.name, json.loads(file.read_text())) for file in summaries]
    parts = [
        heading("The first ten minutes on a GPU", f"benchmarks/first_gpu.sh {folder}", PACKAGES),
        table(HEADER, rows),
    ]
    for file in (folder / "equal.txt", folder / "failed.txt"):
        if file.is_file():
            lines = file.read_text().splitlines()
            parts.append("\n".join(f"* {line}" for line in lines) + "\n")
    for file in sorted(folder.glob("sink_*.md")):
        lines = [line for line in file.read_text().splitlines() if line.startswith("|")]
        parts.append(f"{file.stem}:\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _row(name: str, summary: Mapping[str, Any]) -> list[str]:
    time = summary["time"]
    speed = next((value for key, value in time.items() if key.endswith("s_per_s")), None)
    return [
        name,
        summary["status"],
        str(summary["versions"].get("device", "")),
        f"{summary['steps']:,}",
        _format(time.get("median_step_ms"), 3),
        _format(speed, 0),
        _format(time.get("compile_s"), 1),
        _format(summary["metrics"].get("train_loss"), 4),
    ]


def _format(number: float | None, digits: int) -> str:
    return "" if number is None else f"{number:,.{digits}f}"


if __name__ == "__main__":
    main()
