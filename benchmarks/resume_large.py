"""A large model is trained, killed and resumed: seconds, memory, losses against an unbroken run.

    python -m benchmarks.resume_large                  # 300 million parameters, 8 GB
    python -m benchmarks.resume_large --width 256      # 19 million

A ViT of 24 blocks trains six steps and saves after every second. It is killed (SIGKILL) when the
checkpoint of step 2 exists, and resumed; losses and gradient norms must equal those in an unbroken
run. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import add_save, heading, publish, table

PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "numpy")
STEPS = 6
EVERY = 2
POLL_S = 0.02


def main() -> int:
    """Measure and print; return 1 if losses differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    add_save(parser, "resume_large.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        unbroken = _train(root / "whole", args.width)
        _train(root / "broken", args.width, kill=True)
        resumed = _train(root / "broken", args.width)
        equal = _read_losses(root / "whole") == _read_losses(root / "broken")
        rows = [
            [name, f"{seconds:.1f}", f"{peak_mb / 1e3:.2f}", log]
            for name, (seconds, peak_mb, log) in (("unbroken", unbroken), ("resumed", resumed))
        ]
    head = heading(
        "A large model, resumed",
        f"python -m benchmarks.resume_large --width {args.width}",
        PACKAGES,
    )
    result = table(["run", "seconds", "peak GB", "log"], rows)
    verdict = "are equal bit for bit" if equal else "DIFFER"
    load = f"Load {os.getloadavg()[2]:.0f}."
    publish(f"{head}\n{load} Losses and norms {verdict}.\n\n{result}", args.save)
    return 0 if equal else 1


def _train(run_dir: Path, width: int, *, kill: bool = False) -> tuple[float, float, str]:
    """Train, or resume, in a new process; return seconds, its peak in MB, and its log's times."""
    network = [f"model.features={width}", f"model.hidden={4 * width}", "model.heads=16"]
    resume = f"train.resume={run_dir if (run_dir / 'recipe.yaml').exists() else 'null'}"
    command = [
        *(sys.executable, "-m", "pipeline", "+recipe=lenet5_digits", "dataset=synthetic"),
        *("model=vit_b_16", "model.blocks=24", "model.patch=7", *network, "train.batch_size=2"),
        *("dataset.train_size=64", "dataset.eval_size=2", "monitor.tensorboard=false"),
        *(f"train.steps={STEPS}", f"checkpoint.every_steps={EVERY}", "checkpoint.keep=1", resume),
        *("stages=[data,build,compile,train,checkpoint]", "train.sink_size=1"),
        f"hydra.run.dir={run_dir}",
    ]
    started_at = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while kill and not (run_dir / "checkpoints" / str(EVERY)).is_dir() and process.poll() is None:
        time.sleep(POLL_S)
    if kill:
        process.send_signal(signal.SIGKILL)
    _, _, usage = os.wait4(process.pid, 0)
    lines = (run_dir / "run.log").read_text().splitlines()
    times = [line.partition("time ")[2].strip() for line in lines if "first step after" in line]
    return time.perf_counter() - started_at, usage.ru_maxrss / 1e3, times[-1] if times else ""


def _read_losses(run_dir: Path) -> list[tuple[object, ...]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return [(step["step"], step["loss"], step["grad_norm"]) for step in steps]


if __name__ == "__main__":
    sys.exit(main())
