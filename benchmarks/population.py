"""A sweep in one program, against joblib, one process and one process after the other.

    python -m benchmarks.population --recipe lenet5_digits --members 16 --rounds 3 train.steps=200

The jobs differ in learning rate and seed. Each contestant does the whole sweep, from the command
to the last summary, with the programs of the recipe in the cache: `vectorized` in one program,
`joblib` in two processes, the others job after job, in one process or in a process per job. Rounds
alternate. Prints Markdown: wall time and processor time, with the range, and the ratio to
`vectorized` in each round. `steps alone` are steps of members in this process, by their shared
program: a member per processor at once, and one member after the other.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from benchmarks.measure import add_save, alternate, heading, publish, table, usable_cores
from pipeline import load_recipe
from pipeline.backends.xla import XlaExecutable
from pipeline.core.reporter import Reporter
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data
from pipeline.stages.lower import lower
from pipeline.stages.record.summary import read_summary

PACKAGES = ("jax", "jaxlib", "joblib", "hydra-core")
VECTORIZED = "vectorized"
SWEEPS: Mapping[str, Sequence[str]] = {
    VECTORIZED: ["hydra.sweeper.vectorize=true"],
    "joblib, 2 workers": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "one process, job after job": [],
}
PROCESSES = "a process for each job"
ONE_BY_ONE = "one member after the other"


@dataclass(frozen=True)
class Cost:
    """Seconds of a sweep: by the clock, and of all processors."""

    wall_s: float
    cpu_s: float


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="lenet5_digits")
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", action="append", default=[], help="a contestant to leave out")
    add_save(parser, "population.md")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as train.steps=200")
    args = parser.parse_args()
    overrides = [f"+recipe={args.recipe}", *args.overrides]
    with tempfile.TemporaryDirectory() as cache:
        _run([*overrides, f"cache.root={cache}"])
        contestants: dict[str, Callable[[], Cost]] = {
            name: partial(_sweep, overrides, cache, args.members, more)
            for name, more in SWEEPS.items()
        }
        contestants[PROCESSES] = partial(_run_processes, overrides, cache, args.members)
        for name in args.without:
            contestants.pop(name, None)
        sweeps = alternate(contestants, args.rounds)
        steps = _time_steps(args.recipe, [*args.overrides, f"cache.root={cache}"], args.rounds)
    options = f"--recipe {args.recipe} --members {args.members} --rounds {args.rounds}"
    command = f"python -m benchmarks.population {options} {shlex.join(args.overrides)}".rstrip()
    publish(_report(command, args.members, sweeps, steps), args.save)


def _list_values(members: int) -> list[tuple[float, int]]:
    """Return the learning rate and seed of each member: four rates, and seeds to fill them."""
    seeds = -(-members // 4)
    pairs = [(rate, seed) for rate in (0.005, 0.01, 0.02, 0.04) for seed in range(seeds)]
    return pairs[:members]


def _sweep(overrides: Sequence[str], cache: str, members: int, more: Sequence[str]) -> Cost:
    rates = ",".join(map(str, dict.fromkeys(rate for rate, _ in _list_values(members))))
    seeds = ",".join(map(str, dict.fromkeys(seed for _, seed in _list_values(members))))
    swept = [f"train.optimizer.lr={rates}", f"seed={seeds}"]
    return _run([*overrides, f"cache.root={cache}", *swept, *more], sweeps=members)


def _run_processes(overrides: Sequence[str], cache: str, members: int) -> Cost:
    costs = [
        _run([*overrides, f"cache.root={cache}", f"train.optimizer.lr={rate}", f"seed={seed}"])
        for rate, seed in _list_values(members)
    ]
    return Cost(sum(cost.wall_s for cost in costs), sum(cost.cpu_s for cost in costs))


def _run(overrides: Sequence[str], sweeps: int = 0) -> Cost:
    """Run a command in a new folder. Exits if the command or a job fails."""
    with tempfile.TemporaryDirectory() as folder:
        directory = f"hydra.{'sweep' if sweeps else 'run'}.dir={folder}/runs"
        command = [sys.executable, "-m", "pipeline", *(["-m"] if sweeps else [])]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        children_s = _read_children_s()
        started_at = time.perf_counter()
        process = subprocess.run(
            [*command, *overrides, directory], capture_output=True, text=True, env=environment
        )
        cost = Cost(time.perf_counter() - started_at, _read_children_s() - children_s)
        runs = Path(folder, "runs")
        jobs = [runs / str(job) for job in range(sweeps)] or [runs]
        if process.returncode or any(read_summary(job).status != "done" for job in jobs):
            output = process.stdout[-2000:] + process.stderr[-2000:]
            raise SystemExit(f"{shlex.join(overrides)}: {output}")
    return cost


def _read_children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _time_steps(recipe_name: str, overrides: Sequence[str], rounds: int) -> dict[str, list[Cost]]:
    """Time the steps of a window, with a member per processor; the costs are of one step."""
    recipe = load_recipe(recipe_name, overrides)
    with open(os.devnull, "w", encoding="utf-8") as null_file:
        reporter = Reporter(None, Console(file=null_file))
        dataset = load_data(recipe, reporter)
        backend = recipe.device.open(recipe.parallel)
        built = build(recipe, dataset, reporter)
        built = lower(recipe, dataset, built, backend, None, reporter)
        executable = compile_programs(recipe, dataset, built, backend, reporter)
    assert isinstance(executable, XlaExecutable)
    num_steps = min(200, built.run_schedule.total)
    num_members = max(2, usable_cores())
    members = [
        replace(executable, buffers=jax.tree.map(lambda x: x.copy(), executable.buffers))
        for _ in range(num_members)
    ]
    states = [member.put(member.init()) for member in members]

    def train(index: int) -> None:
        states[index], _ = members[index].run(states[index], 0, num_steps, "loop")
        jax.block_until_ready(states[index])

    def time_members(threads: int) -> Cost:
        started_at = time.perf_counter()
        cpu_before_s = time.process_time()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(train, range(num_members)))
        total = num_steps * num_members
        wall_s = time.perf_counter() - started_at
        cpu_s = time.process_time() - cpu_before_s
        return Cost(wall_s / total, cpu_s / total)

    contestants = {
        f"{num_members} at once": partial(time_members, num_members),
        ONE_BY_ONE: partial(time_members, 1),
    }
    time_members(1)
    return alternate(contestants, max(5, rounds))


def _report(
    command: str,
    members: int,
    sweeps: Mapping[str, Sequence[Cost]],
    steps: Mapping[str, Sequence[Cost]],
) -> str:
    first = next(iter(steps))
    heads = ("a sweep", "seconds", "processor seconds", f"against {VECTORIZED}")
    step_heads = ("steps alone", "ms a step", "processor ms", f"against {first}")
    parts = [
        heading("A sweep in one program", command, PACKAGES),
        f"{members} jobs, medians of {len(sweeps[VECTORIZED])} alternating rounds, with ranges;"
        " ratios are of rounds.\n",
        table(heads, [_make_row(name, sweeps, VECTORIZED, 1) for name in sweeps]),
        "",
        table(step_heads, [_make_row(name, steps, first, 1000) for name in steps]),
    ]
    return "\n".join(parts)


def _make_row(name: str, costs: Mapping[str, Sequence[Cost]], base: str, unit: float) -> list[str]:
    walls = [unit * cost.wall_s for cost in costs[name]]
    cpus = [unit * cost.cpu_s for cost in costs[name]]
    ratios = [
        cost.wall_s / other.wall_s for cost, other in zip(costs[name], costs[base], strict=True)
    ]
    return [name, _format_span(walls), _format_span(cpus), _format_span(ratios) + " x"]


def _format_span(values: Sequence[float]) -> str:
    digits = 1 if min(values) >= 10 else 2 if min(values) >= 1 else 4
    figures = (min(values), statistics.median(values), max(values))
    low, middle, high = (f"{np.round(figure, digits):.{digits}f}" for figure in figures)
    return f"{middle} ({low} to {high})"


if __name__ == "__main__":
    main()
