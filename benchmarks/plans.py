"""The planner's ranks of plans against measured ones: 12 plans on 8 devices of this host.

    python -m benchmarks.plans --save

Every plan is priced with the rates of this host (pipeline/backends/planner/host_rates.yaml), then
compiled and trained by `parallel.mode=semi_auto`, in turn with the others. Prints, per plan, the
predicted milliseconds of a step, their median and range on the clock, and the median of processor
time over the cores, which is a step's time if no other program uses them; and Kendall's tau of the
prediction and both.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from scipy.stats import kendalltau

from benchmarks.measure import add_save, alternate, heading, publish, table, usable_cores
from pipeline import load_recipe
from pipeline.backends.base import Executable
from pipeline.backends.planner.blocks import OperatorUse, Role, StepBlocks
from pipeline.backends.planner.decisions import Decisions, ShardingPrices
from pipeline.backends.planner.dimension_groups import Layout, Mesh
from pipeline.backends.planner.find_blocks import find_blocks
from pipeline.backends.planner.parallel_plan import ParallelPlan
from pipeline.backends.planner.rates import load_host_rates
from pipeline.backends.planner.search import find_best_plan
from pipeline.config.recipe import Recipe
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.stages.build import Built, build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data
from pipeline.stages.lower import lower
from pipeline.stages.plan_devices import trace_step, with_plan

PACKAGES = ("jax", "jaxlib", "scipy")
PLANS = 12
DEVICES = 8
SAMPLES = 512


@dataclass(frozen=True)
class Strategy:
    """Plans that a user would consider: a mesh, and what `model` shards of operators by pattern.

    The last pattern that matches a parameter's path counts; with `None` an operator stays
    replicated along `model`, and `data` shards samples. Without `roles` the plan is the best.
    """

    name: str
    mesh: Mesh
    roles: Mapping[str, Role | None] | None = None

    def keeps(self, blocks: StepBlocks, use: OperatorUse, sharding: Layout) -> bool:
        """Return whether the strategy shards an operator like this."""
        if self.roles is None:
            return True
        path = blocks.weights[use.weight].path
        roles = [role for pattern, role in self.roles.items() if fnmatchcase(path, pattern)]
        role = roles[-1]
        by_data, by_model = sharding
        if self.mesh.data > 1 and by_data != use.operator.samples:
            return False
        if self.mesh.model == 1 or by_model is None:
            return by_model is None and (self.mesh.model == 1 or role is None)
        if role == "batch":
            return by_model == use.operator.samples
        return use.operator.dims[by_model].role == role


@dataclass(frozen=True)
class Network:
    """A recipe's network, and strategies; the first plans that differ are measured."""

    overrides: tuple[str, ...]
    sample: tuple[int, ...]
    label: tuple[int, ...]
    classes: int
    strategies: tuple[Strategy, ...]

    @property
    def words(self) -> str:
        """The network's keys and classes."""
        return f"`{' '.join(self.overrides)}`, {self.classes:,} classes"

    def keys(self, data: Path, steps: int) -> list[str]:
        """Return the keys of a recipe that trains it for `steps` steps."""
        return [
            *("dataset=numpy", f"dataset.root={data}", f"dataset.classes={self.classes}"),
            *("dataset.train.ops=[]", "dataset.eval.ops=[]"),
            *("train.epochs=null", "train.epochs=null", f"train.steps={steps}"),
            *("parallel.mode=auto", f"parallel.devices={DEVICES}"),
            *("parallel.reproducible=layout", *self.overrides),
        ]

    def write(self, path: Path) -> None:
        """Write samples to train on."""
        rng = np.random.default_rng(0)
        shape = (SAMPLES, *self.sample)
        # Tokens if each has a label, else pixels.
        samples = (
            rng.integers(0, self.classes, shape, np.int32)
            if self.label
            else rng.standard_normal(shape, np.float32)
        )
        labels = rng.integers(0, self.classes, (SAMPLES, *self.label), np.int32)
        np.savez(path, x_train=samples, y_train=labels, x_test=samples[:256], y_test=labels[:256])


def repeat(name: str, roles: Mapping[str, Role | None], *along_model: int) -> Iterator[Strategy]:
    """Yield a strategy for meshes with these numbers of devices along `model`."""
    for model in along_model:
        yield Strategy(name, Mesh(DEVICES // model, model), roles)


def search_meshes(*along_model: int) -> Iterator[Strategy]:
    """Yield a search for the best plan of each mesh."""
    for model in along_model:
        yield Strategy("best of the mesh", Mesh(DEVICES // model, model))


DATA_PARALLEL = Strategy("data parallel", Mesh(DEVICES, 1), {"*": None})
HEAD = "dense_2/*"
PAIRS: dict[str, Role | None] = {"*": "output", "*dense_1/*": "contracted", "*/out/*": "contracted"}

HEADER = ("mesh, strategy", "plan", "predicted, ms", "clock, ms: median", "range", "processor, ms")

NETWORKS = {
    "mlp": Network(
        overrides=("model=mlp", "model.hidden=[1024,1024]", "train.batch_size=128"),
        sample=(32, 32),
        label=(),
        classes=8192,
        strategies=(
            DATA_PARALLEL,
            *search_meshes(8, 4, 2),
            *repeat("head by classes", {"*": "batch", HEAD: "output"}, 8, 4, 2),
            *repeat("pairs", PAIRS, 8, 4, 2),
            *repeat("head by features", {"*": "batch", HEAD: "contracted"}, 8, 4),
            *repeat("outputs", {"*": "output"}, 8),
            *repeat("inputs", {"*": "contracted"}, 8),
            *repeat("head alone", {"*": None, HEAD: "output"}, 4, 2),
        ),
    ),
    "gpt": Network(
        overrides=(
            *("model=gpt2", "model.blocks=2", "model.features=512", "model.hidden=2048"),
            *("model.heads=8", "model.dropout=0", "train.batch_size=8"),
        ),
        sample=(32,),
        label=(32,),
        classes=8192,
        strategies=(
            DATA_PARALLEL,
            *search_meshes(8, 4, 2),
            *repeat("blocks in pairs", PAIRS | {"*table": "batch"}, 8, 4, 2),
            *repeat("all in pairs", PAIRS, 8, 4, 2),
            *repeat("table alone", {"*": "batch", "*table": "output"}, 8, 4),
            *repeat("outputs", {"*": "output"}, 8),
            *repeat("inputs", {"*": "contracted"}, 8),
            *repeat("dense layers alone", PAIRS | {"*attention*": None, "*table": None}, 4, 2),
        ),
    ),
}


class Times(NamedTuple):
    """Milliseconds of a step: on the clock, and of processor time over the cores."""

    clock: float
    processor: float


class Contestant:
    """A recipe under a plan, compiled and trained round by round."""

    def __init__(self, recipe: Recipe, dataset: Dataset, built: Built, steps: int) -> None:
        self._steps = steps
        self._next_step = 0
        with make_quiet_reporter() as reporter:
            backend = recipe.device.open(recipe.parallel)
            lowered = lower(recipe, dataset, built, backend, None, reporter)
            self._executable: Executable = compile_programs(
                recipe, dataset, lowered, backend, reporter
            )
        self._state = self._executable.init()
        self()

    def __call__(self) -> Times:
        """Train further steps, and time them."""
        stop = self._next_step + self._steps
        started_at = time.perf_counter()
        processor_before_s = time.process_time()
        self._state, _ = self._executable.run(self._state, self._next_step, stop, "loop")
        self._next_step = stop
        per_step = 1000 / self._steps
        return Times(
            per_step * (time.perf_counter() - started_at),
            per_step * (time.process_time() - processor_before_s) / usable_cores(),
        )


def make_quiet_reporter() -> Reporter:
    """Return a reporter that prints nothing."""
    return Reporter(console=Console(file=io.StringIO()))


def find_plans(network: Network, blocks: StepBlocks, state_ratio: float) -> dict[str, ParallelPlan]:
    """Return the first plans of a network's strategies that differ, priced, by name."""
    plans: dict[str, ParallelPlan] = {}
    for strategy in network.strategies:
        prices = ShardingPrices(blocks, strategy.mesh, load_host_rates(), state_ratio)

        def keeps(use: OperatorUse, sharding: Layout, strategy: Strategy = strategy) -> bool:
            return strategy.keeps(blocks, use, sharding)

        plan = find_best_plan(Decisions(prices, keeps))
        if plan is None or any(_alike(plan, other) for other in plans.values()):
            continue
        plans[f"{strategy.mesh}, {strategy.name}"] = plan
    return dict(list(plans.items())[:PLANS])


def _alike(plan: ParallelPlan, other: ParallelPlan) -> bool:
    names = ("mesh", "batch", "specs", "constraints")
    return all(getattr(plan, name) == getattr(other, name) for name in names)


def compare(network: Network, steps: int, rounds: int) -> str:
    """Measure the plans of a network; return the table and Kendall's tau as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "samples.npz")
        network.write(data)
        recipe = load_recipe("lenet5_digits", network.keys(data, steps * (rounds + 1)))
        with make_quiet_reporter() as reporter:
            recipe.device.open(recipe.parallel)
            dataset = load_data(recipe, reporter)
            built = build(recipe, dataset, reporter)
        step = trace_step(recipe, dataset, built)
        blocks = find_blocks(step)
        plans = find_plans(network, blocks, step.state_bytes / blocks.parameter_bytes)
        contestants = {
            name: Contestant(with_plan(recipe, plan), dataset, built, steps)
            for name, plan in plans.items()
        }
        times = alternate(contestants, rounds)
    clock = {name: [time.clock for time in times[name]] for name in times}
    medians = {name: statistics.median(clock[name]) for name in times}
    processor = {name: statistics.median(time.processor for time in times[name]) for name in times}
    rows = [
        [
            name,
            plans[name].strategy,
            f"{plans[name].step_ms:.0f}",
            f"{medians[name]:.0f}",
            f"{min(clock[name]):.0f} to {max(clock[name]):.0f}",
            f"{processor[name]:.0f}",
        ]
        for name in sorted(plans, key=medians.__getitem__)
    ]
    predicted = [plans[name].step_ms for name in plans]
    taus = [
        kendalltau(predicted, [column[name] for name in plans]).statistic
        for column in (medians, processor)
    ]
    return (
        f"{table(HEADER, rows)}\nKendall's tau of the prediction and the clock's median: "
        f"{taus[0]:.2f}; and processor time: {taus[1]:.2f}\n"
    )


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=7)
    add_save(parser, "plans.md")
    args = parser.parse_args()
    parts = [
        f"## {name}: {NETWORKS[name].words}\n\n{compare(NETWORKS[name], args.steps, args.rounds)}"
        for name in args.networks
    ]
    networks = f"--networks {' '.join(args.networks)}"
    options = f"{networks} --steps {args.steps} --rounds {args.rounds}"
    head = heading("Plans", f"python -m benchmarks.plans {options}", PACKAGES)
    setting = f"{args.rounds} rounds of {args.steps} steps; load {os.getloadavg()[2]:.0f}."
    publish("\n".join([head, f"{setting}\n", *parts]), args.save)


if __name__ == "__main__":
    main()
