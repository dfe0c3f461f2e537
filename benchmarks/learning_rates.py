"""The rate that `find-rate` suggests, against the best of a sweep.

    python -m benchmarks.learning_rates --root MNIST --save

Each recipe is trained at rates that differ by a factor of 3, and rated by the loss of its
evaluation. The ratio is the suggested rate over the best one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import add_save, heading, publish, table
from pipeline import load_recipe, run
from pipeline.core.errors import PipelineError
from pipeline.core.reporter import Reporter
from pipeline.study.rate_search import measure_rate_curve, suggest_rate

RATES = tuple(float(f"{rate:.2g}") for rate in 1e-4 * 3.0 ** np.arange(9))
NUM_STEPS = 200
RECIPES: Mapping[str, tuple[str, ...]] = {
    "lenet5_digits": (),
    "breast_cancer_mlp": (),
    "diabetes_mlp": (),
    "bert_docstrings": (),
    "mlp_mnist": ("train.epochs=2",),
    "lenet5_mnist": ("train.epochs=1",),
}
"""Recipes with the keys that shorten them."""
SEARCH_STEPS = {"lenet5_mnist": 1000}
"""Steps of searches that need more than the default."""


def main() -> None:
    """Print, and with --save publish, a row for each recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", help="folder of MNIST; downloaded without it")
    add_save(parser, "learning_rates.md")
    args = parser.parse_args()
    rows = []
    for name, keys in RECIPES.items():
        root = [f"dataset.root={args.root}"] if args.root and "mnist" in name else []
        quiet = ["monitor.tensorboard=false", "monitor.log_level=warning"]
        rows.append(_compare(name, [*keys, *root, *quiet]))
        print(rows[-1], flush=True)
    titles = ["recipe", "suggested", "best of the sweep", "ratio", "losses of the sweep"]
    head = heading("Learning rates", "python -m benchmarks.learning_rates", ["jax"])
    note = f"Rates of the sweep: {', '.join(f'{rate:g}' for rate in RATES)}."
    publish("\n".join([head, note, "", table(titles, rows)]), args.save)


def _compare(name: str, keys: Sequence[str]) -> list[str]:
    """Return the row of a recipe."""
    num_steps = SEARCH_STEPS.get(name, NUM_STEPS)
    curve = measure_rate_curve(load_recipe(name, list(keys)), num_steps, Reporter())
    rate = suggest_rate(curve).rate
    losses = [_train(name, [*keys, f"train.optimizer.lr={rate}"]) for rate in RATES]
    best = RATES[int(np.nanargmin(losses))]
    text = ", ".join(f"{loss:.4g}" for loss in losses)
    return [name, f"{rate:.2g}", f"{best:.2g}", f"{rate / best:.2f}", text]


def _train(name: str, keys: Sequence[str]) -> float:
    """Return the loss of the evaluation; NaN if training diverged."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = run(load_recipe(name, list(keys)), Path(folder))
        except PipelineError:
            return float("nan")
    return summary.metrics["loss"]


if __name__ == "__main__":
    main()
