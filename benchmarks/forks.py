"""Random forks and sharing sweeps, compared with runs of their own, byte for byte.

    python -m benchmarks.forks --forks 20 --sweeps 30 --seed 0 --save

A fork without changed keys is compared with its run, a longer one with a run of that length, and
each job of a sweep with `hydra.sweeper.share=true` with the same job of a sweep without: jobs of
several lengths, of several values of a schedule, and both over seeds or learning rates. Compared
are all files but those that have times. A sweep also fails if its jobs train other steps than its
plan says. The exit status is 1 if there is a failure.
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
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import add_save, heading, publish, table
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
    return [*draws.choice(SCHEDULES), *_draw_other_keys(draws)]


def _draw_other_keys(draws: random.Random) -> list[str]:
    keys = [f"seed={draws.randrange(1000)}"]
    keys.append(draws.choice(("optimizer=momentum", "optimizer=adam")))
    keys.append(f"eval.every_steps={draws.choice(('null', '7', '10'))}")
    keys.append(f"checkpoint.every_steps={draws.choice(('null', '8', '20'))}")
    keys.append(f"train.accumulate_steps={draws.choice((1, 1, 2))}")
    return keys


def draw_sweep(draws: random.Random) -> tuple[list[str], str]:
    """Return the keys of a sweep, and what its jobs differ in.

    Each has jobs that share steps: several lengths, or several values of a schedule's key; half of
    the sweeps combine them with two seeds or learning rates, whose jobs share none.
    """
    keys = _draw_other_keys(draws)
    schedule = list(draws.choice((SCHEDULES[0], *SCHEDULES[2:])))
    varied = draws.choice(("lengths", "lengths", "schedules"))
    length = draws.randrange(30, 90)
    if varied == "lengths":
        lengths = sorted(draws.sample(range(30, 90), draws.randrange(2, 5)))
        schedule.append(f"train.steps={_join(lengths)}")
    elif draws.random() < 0.5:
        shares = sorted(draws.sample((0.1, 0.2, 0.3, 0.5, 0.7), 3))
        schedule = [SCHEDULES[2][0], f"train.schedule.cooldown_share={_join(shares)}"]
        schedule.append(f"train.steps={length}")
    else:
        ends = draws.sample(range(12, 30), 3)
        schedule = [SCHEDULES[3][0], f"train.schedule.milestones={_join([[9, n] for n in ends])}"]
        schedule += [SCHEDULES[3][2], f"train.steps={length}"]
    others = draws.choice(("", "", "seed=1,2", "train.optimizer.lr=0.01,0.02"))
    if others.startswith("seed"):
        keys = keys[1:]
    return [*keys, *schedule, *filter(None, [others])], f"{varied} {others}".strip()


def _join(values: Sequence[object]) -> str:
    return ",".join(str(value).replace(" ", "") for value in values)


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


@dataclass(frozen=True)
class SweepCheck:
    """What a sweep that shares steps has, compared with the same jobs alone."""

    varied: str
    jobs: int
    differing: Sequence[str]
    """Files with other bytes."""
    alone: int
    """Steps of all jobs alone."""
    planned: int
    """Steps that are trained, by the plan; -1 if there is none."""
    trained: int
    """Steps that were trained, by the jobs' summaries and the stretches that were announced."""

    @property
    def is_failure(self) -> bool:
        """Whether a byte differs, or the plan isn't what was trained, or saves nothing."""
        return bool(self.differing) or not self.planned == self.trained < self.alone

    def list_figures(self) -> list[str]:
        """Return the cells of its row."""
        files = ", ".join(self.differing) or "equal"
        return [self.varied, *map(str, (self.jobs, self.alone, self.planned, self.trained)), files]


def check_sweep(draws: random.Random, folder: Path) -> SweepCheck:
    """Train a random sweep that shares steps, and the same jobs alone."""
    keys, varied = draw_sweep(draws)
    words = [*SMALL, *keys, "-m"]
    shared, alone = folder / "shared", folder / "alone"
    text = run_quietly(*words, f"hydra.sweep.dir={shared}", "hydra.sweeper.share=true")
    run_quietly(*words, f"hydra.sweep.dir={alone}")
    match = TRAINED.search(text)
    planned = int(match[1].replace(",", "")) if match else -1
    stretches = re.findall(r"^shared steps ([\d,]+) to ([\d,]+)$", text, re.MULTILINE)
    trained = sum(int(b.replace(",", "")) - int(a.replace(",", "")) + 1 for a, b in stretches)
    jobs = sorted(path.parent.name for path in alone.glob("*/summary.json"))
    differing, steps = [], 0
    for name in jobs:
        files = list_differing_files(shared / name, alone / name)
        differing += [f"{name}/{file}" for file in files]
        summary = json.loads((shared / name / "summary.json").read_text())
        steps += summary["steps"]
        trained += summary["steps"] - (summary.get("resumed_from") or {"step": 0})["step"]
    return SweepCheck(varied, len(jobs), differing, steps, planned, trained)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each fork and sweep; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forks", type=int, default=20)
    parser.add_argument("--sweeps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    add_save(parser, "forks.md")
    options = parser.parse_args(arguments)
    differing_forks = 0
    for number in range(options.forks):
        with tempfile.TemporaryDirectory() as folder:
            differing = check_fork(random.Random(f"fork {options.seed} {number}"), Path(folder))
        differing_forks += bool(differing)
        print(f"fork {number}: {differing or 'equal'}", flush=True)
    sweeps = []
    for number in range(options.sweeps):
        with tempfile.TemporaryDirectory() as folder:
            draws = random.Random(f"sweep {options.seed} {number}")
            sweeps.append(check_sweep(draws, Path(folder)))
        print(f"sweep {number}", *sweeps[-1].list_figures(), sep=" | ", flush=True)
    failures = sum(sweep.is_failure for sweep in sweeps)
    command = f"python -m benchmarks.forks --forks {options.forks} --sweeps {options.sweeps}"
    header = ["jobs differ in", "jobs", "steps alone", "planned", "trained", "files"]
    parts = [
        heading("Forks and shared steps", f"{command} --seed {options.seed}", ("jax", "jaxlib")),
        f"Forks with other bytes: {differing_forks} of {options.forks}. Sweeps with other bytes or "
        f"other steps than planned: {failures} of {options.sweeps}.\n",
        table(header, [sweep.list_figures() for sweep in sweeps]),
    ]
    publish("\n".join(parts), options.save)
    return 1 if failures + differing_forks else 0


if __name__ == "__main__":
    sys.exit(main())
