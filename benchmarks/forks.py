"""Random forks and sharing sweeps, compared with runs of their own, byte for byte.

    python -m benchmarks.forks --forks 20 --sweeps 10 --seed 0

A fork without changed keys is compared with its run, a longer one with a run of that length, and
each job of a sweep with `hydra.sweeper.share=true` with the same job of a sweep without. Compared
are all files but those that have times. The exit status is 1 if a byte differs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.__main__ import main as run_command

WITH_TIMES = ("manifest.json", "_CHECKPOINT_METADATA", "manifest.ocdbt", "provenance.json")
"""Files that have times, or checksums of files with times."""
LOGS = ("run.log", "summary.json", "status.json", ".lock", ".claim")
SMALL = (
    "+recipe=lenet5_digits",
    "model=mlp",
    "model.hidden=[16]",
    "monitor.tensorboard=false",
    "monitor.sample_images=0",
)
SCHEDULES = (
    ("schedule=constant",),
    ("schedule=cosine", "train.schedule.warmup_steps=5"),
    ("schedule=warmup_stable_decay", "train.schedule.cooldown_share=0.3"),
    ("schedule=piecewise", "train.schedule.milestones=[20,35]", "train.schedule.factors=[0.5,0.1]"),
)
TRAINED = re.compile(r"share .*: ([\d,]+) are trained, ([\d,]+) saved")


def list_differing_files(one: Path, other: Path, ignored: Sequence[str] = ()) -> list[str]:
    """Return the files that only one of two run directories has, or that have other bytes."""
    left, right = _read_files(one), _read_files(other)
    return [
        name
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name) and not any(part in name for part in ignored)
    ]


def _read_files(run_dir: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run_dir)): path.read_bytes()
        for path in run_dir.rglob("*")
        if path.is_file() and path.name not in (*WITH_TIMES, *LOGS)
    }


def run_quietly(*words: str) -> str:
    """Run a command in this process, and return its text. Raises RuntimeError if it fails."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = run_command(list(words))
    if status:
        raise RuntimeError(f"status {status}: {' '.join(words)}\n{output.getvalue()[-2000:]}")
    return output.getvalue()


def draw_keys(draws: random.Random) -> list[str]:
    """Return keys of a recipe: schedule, optimizer, seed, evaluations and checkpoints."""
    keys = [*draws.choice(SCHEDULES), f"seed={draws.randrange(1000)}"]
    keys.append(draws.choice(("optimizer=momentum", "optimizer=adam")))
    keys.append(f"eval.every_steps={draws.choice(('null', '7', '10'))}")
    keys.append(f"checkpoint.every_steps={draws.choice(('null', '8', '20'))}")
    keys.append(f"train.accumulate_steps={draws.choice((1, 1, 2))}")
    return keys


def check_fork(draws: random.Random, folder: Path) -> list[str]:
    """Return the differing files of a random fork; its checkpoints but the last may differ."""
    keys = draw_keys(draws)
    steps = draws.randrange(30, 60)
    run_dir, fork_dir = folder / "run", folder / "fork"
    run_quietly(*SMALL, *keys, f"train.steps={steps}", f"hydra.run.dir={run_dir}")
    longer = steps + draws.randrange(5, 30)
    # A schedule as long as the run has other rates in a longer one.
    goes_on = "schedule=constant" in keys and draws.random() < 0.5
    if goes_on:
        run_quietly("fork", f"{run_dir}@end", f"train.steps={longer}", f"--out={fork_dir}")
        run_dir = folder / "longer"
        run_quietly(*SMALL, *keys, f"train.steps={longer}", f"hydra.run.dir={run_dir}")
    else:
        step = draws.randrange(steps)
        run_quietly("fork", f"{run_dir}@{step}", f"--out={fork_dir}")
    last = f"checkpoints/{longer if goes_on else steps}/"
    earlier = [f"checkpoints/{step}/" for step in range(longer) if f"checkpoints/{step}/" != last]
    return list_differing_files(run_dir, fork_dir, earlier)


def check_sweep(draws: random.Random, folder: Path) -> tuple[list[str], int, int]:
    """Return the differing files of a random sweep that shares steps, and the steps that its plan
    and its jobs' lengths say it saves."""
    keys = [key for key in draw_keys(draws) if not key.startswith("schedule=cosine")]
    keys = [key for key in keys if "warmup_steps=5" not in key]
    lengths = sorted(draws.sample(range(30, 90), draws.randrange(2, 5)))
    words = [*SMALL, *keys, f"train.steps={','.join(map(str, lengths))}", "-m"]
    shared, alone = folder / "shared", folder / "alone"
    text = run_quietly(*words, f"hydra.sweep.dir={shared}", "hydra.sweeper.share=true")
    run_quietly(*words, f"hydra.sweep.dir={alone}")
    match = TRAINED.search(text)
    planned = int(match[1].replace(",", "")) if match else -1
    stretches = re.findall(r"^shared steps ([\d,]+) to ([\d,]+)$", text, re.MULTILINE)
    trained = sum(int(b.replace(",", "")) - int(a.replace(",", "")) + 1 for a, b in stretches)
    differing = []
    for number in range(len(lengths)):
        differing += list_differing_files(shared / str(number), alone / str(number))
        summary = json.loads((shared / str(number) / "summary.json").read_text())
        trained += summary["steps"] - summary["resumed_from"]["step"]
    return differing, planned, trained


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each fork and sweep; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forks", type=int, default=20)
    parser.add_argument("--sweeps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    failures = 0
    for number in range(options.forks):
        with tempfile.TemporaryDirectory() as folder:
            differing = check_fork(random.Random(f"fork {options.seed} {number}"), Path(folder))
        failures += bool(differing)
        print(f"fork {number}: {differing or 'equal'}", flush=True)
    for number in range(options.sweeps):
        with tempfile.TemporaryDirectory() as folder:
            draws = random.Random(f"sweep {options.seed} {number}")
            differing, planned, trained = check_sweep(draws, Path(folder))
        failures += bool(differing) or planned != trained
        text = f"{planned} steps planned, {trained} trained"
        print(f"sweep {number}: {differing or 'equal'}, {text}", flush=True)
    print(f"{options.forks} forks and {options.sweeps} sweeps, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
