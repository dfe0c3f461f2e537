"""A sweep in one program, against joblib, one process and one process after the other.

    python -m benchmarks.population --recipe lenet5_digits --members 16 --rounds 3 train.steps=200

The jobs differ in learning rate and seed. Each contestant does the whole sweep, from the command
to the last summary, with the programs of the recipe in the cache: `vectorized` in one program,
`joblib` in two processes, the others job after job, in one process or in one each. Rounds
alternate. Prints Markdown: wall time and processor time, with the range, and the ratio to
`vectorized` in each round. `steps alone` are those of members in this process, by their shared
program, as many at once as there are processors and one member after the other.
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
class Took:
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
        contestants: dict[str, Callable[[], Took]] = {
            name: partial(_sweep, overrides, cache, args.members, more)
            for name, more in SWEEPS.items()
        }
        contestants[PROCESSES] = partial(_processes, overrides, cache, args.members)
        wanted = {name: c for name, c in contestants.items() if name not in args.without}
        sweeps = alternate(wanted, args.rounds)
        steps = _steps(args.recipe, [*args.overrides, f"cache.root={cache}"], args.rounds)
    asked = f"--recipe {args.recipe} --members {args.members} --rounds {args.rounds}"
    command = f"python -m benchmarks.population {asked} {shlex.join(args.overrides)}".rstrip()
    publish(_report(command, args.members, sweeps, steps), args.save)


def _values(members: int) -> list[tuple[float, int]]:
    """Learning rate and seed of each member: four rates, and as many seeds as that takes."""
    seeds = -(-members // 4)
    pairs = [(rate, seed) for rate in (0.005, 0.01, 0.02, 0.04) for seed in range(seeds)]
    return pairs[:members]


def _sweep(overrides: Sequence[str], cache: str, members: int, more: Sequence[str]) -> Took:
    rates = ",".join(map(str, dict.fromkeys(rate for rate, _ in _values(members))))
    seeds = ",".join(map(str, dict.fromkeys(seed for _, seed in _values(members))))
    swept = [f"train.optimizer.lr={rates}", f"seed={seeds}"]
    return _run([*overrides, f"cache.root={cache}", *swept, *more], sweeps=members)


def _processes(overrides: Sequence[str], cache: str, members: int) -> Took:
    done = [
        _run([*overrides, f"cache.root={cache}", f"train.optimizer.lr={rate}", f"seed={seed}"])
        for rate, seed in _values(members)
    ]
    return Took(sum(one.wall_s for one in done), sum(one.cpu_s for one in done))


def _run(overrides: Sequence[str], sweeps: int = 0) -> Took:
    """Run a command in a folder of its own. Exits where it fails, or where a job did."""
    with tempfile.TemporaryDirectory() as folder:
        where = f"hydra.{'sweep' if sweeps else 'run'}.dir={folder}/runs"
        command = [sys.executable, "-m", "pipeline", *(["-m"] if sweeps else [])]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        before, begun = _children_s(), time.perf_counter()
        done = subprocess.run(
            [*command, *overrides, where], capture_output=True, text=True, env=environment
        )
        took = Took(time.perf_counter() - begun, _children_s() - before)
        runs = Path(folder, "runs")
        jobs = [runs / str(job) for job in range(sweeps)] or [runs]
        if done.returncode or any(read_summary(job).status != "done" for job in jobs):
            raise SystemExit(f"{shlex.join(overrides)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return took


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _steps(recipe_name: str, overrides: Sequence[str], rounds: int) -> dict[str, list[Took]]:
    """The steps of one window for as many members as there are processors, per step."""
    recipe = load_recipe(recipe_name, overrides)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        reporter = Reporter(None, Console(file=nowhere))
        dataset, backend = load_data(recipe, reporter), recipe.device.open(recipe.parallel)
        built = build(recipe, dataset, reporter)
        built = lower(recipe, dataset, built, backend, None, reporter)
        compiled = compile_programs(recipe, dataset, built, backend, reporter)
    assert isinstance(compiled, XlaExecutable)
    steps, places = min(200, built.run_schedule.total), max(2, usable_cores())
    members = [
        replace(compiled, buffers=jax.tree.map(lambda x: x.copy(), compiled.buffers))
        for _ in range(places)
    ]
    states = [member.put(member.init()) for member in members]

    def train(place: int) -> None:
        states[place], _ = members[place].run(states[place], 0, steps, "loop")
        jax.block_until_ready(states[place])

    def timed(threads: int) -> Took:
        begun, used = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(train, range(places)))
        each = steps * places
        return Took((time.perf_counter() - begun) / each, (time.process_time() - used) / each)

    contestants = {f"{places} at once": partial(timed, places), ONE_BY_ONE: partial(timed, 1)}
    timed(1)
    return alternate(contestants, max(5, rounds))


def _report(
    command: str,
    members: int,
    sweeps: Mapping[str, Sequence[Took]],
    steps: Mapping[str, Sequence[Took]],
) -> str:
    first = next(iter(steps))
    heads = ("a sweep", "seconds", "processor seconds", f"against {VECTORIZED}")
    return "\n".join(
        (
            heading("A sweep in one program", command, PACKAGES),
            f"{members} jobs, medians of {len(sweeps[VECTORIZED])} alternating rounds, with ranges;"
            " ratios are of rounds.\n",
            table(heads, [_row(name, sweeps, VECTORIZED, 1) for name in sweeps]),
            "",
            table(
                ("steps alone", "ms a step", "processor ms", f"against {first}"),
                [_row(name, steps, first, 1000) for name in steps],
            ),
        )
    )


def _row(name: str, taken: Mapping[str, Sequence[Took]], base: str, unit: float) -> list[str]:
    walls = [unit * one.wall_s for one in taken[name]]
    cpus = [unit * one.cpu_s for one in taken[name]]
    ratios = [
        one.wall_s / other.wall_s for one, other in zip(taken[name], taken[base], strict=True)
    ]
    return [name, _span(walls), _span(cpus), _span(ratios) + " x"]


def _span(values: Sequence[float]) -> str:
    digits = 1 if min(values) >= 10 else 2 if min(values) >= 1 else 4
    low, middle, high = (
        f"{np.round(x, digits):.{digits}f}"
        for x in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


if __name__ == "__main__":
    main()
