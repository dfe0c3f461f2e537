"""False verdicts, power and saved runs of `python -m pipeline better`.

    python -m benchmarks.better --save

The first two tables train an MLP of 64-8-10 on the shipped digits for two epochs, by one program
whose arguments have the seed. A comparison is A against A: its pairs have two different seeds, so
every verdict is false. A planted effect of k sigma adds k standard deviations of the differences to
side B, and is compared with draws from a normal distribution. The third table compares a change of
five recipes over the same seeds.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console

from benchmarks.measure import add_save, heading, publish, table
from pipeline import load_recipe
from pipeline.backends.loading.loader import make_loader
from pipeline.backends.loading.window import LoaderSource
from pipeline.backends.xla import XlaExecutable
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.data.random import seed_words
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data
from pipeline.stages.evaluate import EvalOptions, evaluate
from pipeline.stages.lower import lower
from pipeline.study.paired_test import count_pairs_to_decide, count_unpaired_runs

PACKAGES = ("jax", "jaxlib")
TINY = ["model=mlp", "model.hidden=[8]", "schedule=constant", "train.epochs=2"]
METRICS = ("accuracy", "loss")
EFFECTS = (0.5, 1.0, 2.0)
DRAWS = 2000
CHANGE_PAIRS = 16
CHANGES: Sequence[tuple[str, Sequence[str], Sequence[str], str]] = (
    ("lenet5_digits", ["train.epochs=8"], ["train.optimizer.lr=0.04"], "accuracy"),
    ("lenet5_digits", [*TINY], ["train.optimizer.momentum=0.8"], "accuracy"),
    ("breast_cancer_mlp", [], ["train.batch_size=64"], "loss"),
    ("diabetes_mlp", [], ["train.batch_size=16"], "rmse"),
    (
        "breast_cancer_mlp",
        ["dataset.shipped=wine", "dataset.target=cultivar"],
        ["model.hidden=[64]"],
        "loss",
    ),
)
"""Recipe, overrides of both sides, overrides of side B, metric."""


@dataclass(frozen=True)
class SeededRuns:
    """Runs of one recipe that differ in their seed, by one program."""

    dataset: Dataset
    executable: XlaExecutable
    steps: int
    options: EvalOptions

    def measure(self, seed: int) -> dict[str, float]:
        """Train with a seed, and return the metrics of the evaluation."""
        order = replace(self.dataset.train_order, seed=seed)
        placement = self.executable.placement
        source = LoaderSource(self.dataset.train, order, placement, self.steps, short_first=True)
        work = replace(
            self.executable.work,
            seed=seed_words(seed),
            train=make_loader(source, "resident", lambda *_: None),
        )
        run = replace(self.executable, work=work)
        state, _ = run.run(run.init(), 0, self.steps, "loop")
        # The program has consumed the buffers of the first run.
        self.executable.buffers = run.buffers
        evaluation = evaluate(run, state, self.dataset, self.options)
        assert evaluation is not None
        return {name: float(evaluation.scalars()[name]) for name in evaluation.scalars()}


def prepare_runs(name: str, overrides: Sequence[str]) -> SeededRuns:
    """Compile the program of a recipe."""
    recipe = load_recipe(name, overrides)
    reporter = Reporter(console=Console(file=io.StringIO()))
    dataset = load_data(recipe, reporter)
    backend = recipe.device.open(recipe.parallel)
    built = lower(recipe, dataset, build(recipe, dataset, reporter), backend, None, reporter)
    executable = compile_programs(recipe, dataset, built, backend, reporter)
    assert isinstance(executable, XlaExecutable)
    options = EvalOptions(recipe.train.dispatch_seconds, built.step_config.metrics)
    return SeededRuns(dataset, executable, built.run_schedule.total, options)


def measure_equal_sides(comparisons: int, pairs: int) -> dict[str, np.ndarray]:
    """Return the differences of comparisons of A with A, (comparisons, pairs), by metric."""
    runs = prepare_runs("lenet5_digits", TINY)
    values = [runs.measure(seed) for seed in range(1, 2 * comparisons * pairs + 1)]
    shape = (comparisons, pairs, 2)
    sides = {m: np.array([value[m] for value in values]).reshape(shape) for m in METRICS}
    return {metric: side[..., 1] - side[..., 0] for metric, side in sides.items()}


def count_verdicts(comparisons: Iterable[np.ndarray]) -> list[int]:
    """Return the pairs that each comparison takes; 0 without a verdict."""
    return [count_pairs_to_decide(differences) or 0 for differences in comparisons]


def format_share(counts: Sequence[int]) -> str:
    """Return the share of comparisons with a verdict."""
    return f"{np.mean(np.array(counts) > 0):.1%}"


def format_false_verdicts(differences: dict[str, np.ndarray]) -> str:
    """Return a table of false verdicts."""
    rows = []
    for metric, comparisons in differences.items():
        counts = count_verdicts(comparisons)
        num_false = sum(count > 0 for count in counts)
        rows.append([metric, str(len(counts)), str(num_false), format_share(counts)])
    return table(["metric", "comparisons of A with A", "false verdicts", "share"], rows)


def format_power(differences: dict[str, np.ndarray]) -> str:
    """Return a table of the verdicts on planted effects, and of those on normal draws."""
    rng = np.random.default_rng(1)
    rows = []
    for effect in EFFECTS:
        pairs = next(iter(differences.values())).shape[1]
        expected = count_verdicts(rng.normal(effect, 1.0, (DRAWS, pairs)))
        for metric, comparisons in differences.items():
            counts = count_verdicts(comparisons + effect * comparisons.std())
            decided = [count for count in counts if count]
            rows.append(
                [
                    f"{effect:g} sigma",
                    metric,
                    format_share(counts),
                    format_share(expected),
                    f"{np.median(decided):.0f}" if decided else "",
                ]
            )
    return table(["effect", "metric", "found", "computed", "median of pairs, if found"], rows)


def format_changes(pairs: int) -> str:
    """Return a table of changes of recipes: pairs that decide, and the runs that it takes."""
    rows = []
    for name, shared, changed, metric in CHANGES:
        side_a = prepare_runs(name, shared)
        side_b = prepare_runs(name, [*shared, *changed])
        seeds = range(1, pairs + 1)
        values = np.array([[side.measure(s)[metric] for side in (side_a, side_b)] for s in seeds])
        differences = values[:, 1] - values[:, 0]
        count = count_pairs_to_decide(differences)
        num_used = count or pairs
        unpaired = count_unpaired_runs(values[:num_used, 0], values[:num_used, 1])
        rows.append(
            [
                " ".join([name, *shared]),
                " ".join(changed),
                f"{metric} {differences.mean():+.2g}",
                f"{np.corrcoef(values.T)[0, 1]:.2f}",
                f"{count}" if count else f"none in {pairs}",
                f"{2 * num_used}",
                f"{unpaired}",
            ]
        )
    head = ["recipe", "side B", "mean of B - A", "correlation", "pairs", "runs", "unpaired"]
    return table(head, rows)


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comparisons", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=16, help="of A with A")
    add_save(parser, "better.md")
    args = parser.parse_args()
    options = f"--comparisons {args.comparisons} --pairs {args.pairs}"
    command = f"python -m benchmarks.better {options} --save"
    differences = measure_equal_sides(args.comparisons, args.pairs)
    parts = [
        heading("Verdicts of `better`", command, PACKAGES),
        f"A against A with other seeds, at most {args.pairs} pairs, 95 %:\n",
        format_false_verdicts(differences),
        "Planted effects, in standard deviations of a pair's difference; computed: normal draws:\n",
        format_power(differences),
        f"Changes of recipes, at most {CHANGE_PAIRS} pairs; `unpaired`: runs of a comparison with "
        "separate seeds that is as precise:\n",
        format_changes(CHANGE_PAIRS),
    ]
    publish("\n".join(parts), args.save)


if __name__ == "__main__":
    main()
