"""Self-test of an installation: the commands of a user, in an empty folder and without a network.

A run is trained in sinks of two sizes, of which the losses must be equal; a step after its
checkpoint is replayed; its network is exported; a step is priced on the emulated Ascend.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.core.files.paths import PACKAGE

STEPS = 60
CHECKPOINT = 40
LIMIT_S = 300
"""Longest time of a command, on a slow machine."""
SHORT = (
    f"train.steps={STEPS}",
    f"checkpoint.every_steps={CHECKPOINT}",
    "monitor.tensorboard=false",
    "monitor.sample_images=0",
    "cache.root=cache",
)
COMMANDS: Mapping[str, Sequence[str]] = {
    "train": (*SHORT, "train.sink_size=20", "hydra.run.dir=run"),
    "sinks": (*SHORT, "train.sink_size=7", "hydra.run.dir=short"),
    "replay": ("step", "run", str(CHECKPOINT + 5)),
    "export": ("export", "run", "exported"),
    "ascend910": ("device=ascend910", "stages=[data,build,compile]", "hydra.run.dir=priced"),
}
"""Arguments of each part."""


def run_self_test(folder: Path) -> Iterator[tuple[str, str]]:
    """Run the parts in an empty folder; yield the name of each, and its problem or ""."""
    path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    for name, arguments in COMMANDS.items():
        problem = ""
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "pipeline", *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            problem = f"it has run for {LIMIT_S} s"
        else:
            if ended.returncode != 0:
                problem = f"status {ended.returncode}: {_find_last_line(ended.stderr)}"
            elif name == "sinks":
                problem = _compare_losses(folder / "run", folder / "short")
        yield name, problem


def _find_last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")


def _compare_losses(first: Path, second: Path) -> str:
    """Return where the losses of two runs differ; "" if they are equal."""
    losses, others = (
        [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (first, second)
    )
    if len(losses) != STEPS or len(others) != STEPS:
        return f"{len(losses)} and {len(others)} steps were logged instead of {STEPS}"
    for step, (loss, other) in enumerate(zip(losses, others, strict=True), start=1):
        if loss != other:
            return f"step {step} has the loss {loss} in sinks of 20, and {other} in sinks of 7"
    return ""
