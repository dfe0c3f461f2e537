"""How well the sample ledger finds wrong labels, beside cleanlab out of fold, and its cost.

    pip install cleanlab
    python -m benchmarks.ledger --root MNIST --texts TEXTS.csv --save

Shipped recipes are trained at their own length with a share of the training labels replaced by
others, drawn at random. The precision at k is the share of replaced labels among the k most
suspicious ones, for k replaced labels. cleanlab ranks by the probability of the label that the same
recipe predicts for a fifth of the samples, trained on the other four.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console

from benchmarks.measure import add_save, heading, publish, table
from pipeline import load_recipe, run
from pipeline.checkpoint.restore import read_saved
from pipeline.config.recipe import Recipe
from pipeline.core.reporter import Reporter
from pipeline.data.columns import RawData
from pipeline.data.row_views import select_samples
from pipeline.inspect.report import evaluated
from pipeline.inspect.report.suspicious_labels import score_labels
from pipeline.stages import data
from pipeline.stages.record.trained_run import read_trained_run
from pipeline.training.features.ledger import SampleLedger

FOLDS = 5
MNIST_SHARES = (0.05,)
SHARES = (0.02, 0.05, 0.1)
RECIPES: Mapping[str, Sequence[str]] = {
    "lenet5_digits": (),
    "breast_cancer_mlp": (),
    "breast_cancer_mlp, wine": ("dataset.shipped=wine", "dataset.target=cultivar"),
    "bert_docstrings": (),
    "lenet5_mnist": (),
    "mlp_mnist": (),
}
QUIET = ("monitor.tensorboard=false", "monitor.loss_every=0", "monitor.log_level=error")
Change = Callable[[RawData], RawData]


def flip_labels(labels: np.ndarray, classes: int, share: float, seed: int) -> np.ndarray:
    """Return labels, int (n,), of which a share is replaced by other classes at random."""
    random = np.random.default_rng(seed)
    wrong = random.permutation(len(labels))[: round(share * len(labels))]
    changed = labels.copy()
    changed[wrong] = (labels[wrong] + random.integers(1, classes, len(wrong))) % classes
    return changed


@contextmanager
def changed_data(change: Change) -> Iterator[None]:
    """Change the data that runs in the body read."""
    read = data.read_selected

    def read_changed(recipe: Recipe) -> RawData:
        return change(read(recipe))

    with mock.patch.object(data, "read_selected", read_changed):
        yield


def with_labels(raw: RawData, labels: np.ndarray) -> RawData:
    """Return the data with other training labels."""
    return replace(raw, train=replace(raw.train, columns={**raw.train.columns, "label": labels}))


class FlippedData:
    """A change that replaces labels, and the true and the replaced labels."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self.share = share
        self.seed = seed
        self.true = self.labels = np.zeros(0, np.int32)

    def __call__(self, raw: RawData) -> RawData:
        self.true = np.asarray(raw.train.columns["label"][:])
        self.labels = flip_labels(self.true, len(raw.targets), self.share, self.seed)
        return with_labels(raw, self.labels)

    def rate(self, suspicion: np.ndarray) -> float:
        """Return the precision at k of a number for each sample, larger for wrong labels."""
        wrong = self.true != self.labels
        worst = np.argsort(-suspicion, kind="stable")[: wrong.sum()]
        return float(wrong[worst].mean())


def rank_by_ledger(name: str, keys: Sequence[str], flipped: FlippedData) -> tuple[float, float]:
    """Return the precision at k of the ledger, and the share of right suggestions."""
    with tempfile.TemporaryDirectory() as folder, changed_data(flipped):
        run(load_recipe(name, [*keys, *QUIET, "train.ledger=true"]), Path(folder) / "run")
        arrays = read_saved(Path(folder) / "run").arrays
    names = [field.name for field in fields(SampleLedger)]
    saved: dict[str, Any] = {name: arrays[f"ledger/{name}"] for name in names}
    ledger = SampleLedger(**saved)
    wrong = flipped.true != flipped.labels
    right = arrays["ledger/rival"][wrong] == flipped.true[wrong]
    return flipped.rate(score_labels(ledger)), float(right.mean())


def rank_by_cleanlab(name: str, keys: Sequence[str], flipped: FlippedData) -> float:
    """Return the precision at k of cleanlab's quality scores, out of fold."""
    from cleanlab.rank import get_label_quality_scores

    probabilities = np.zeros(0)
    for fold in range(FOLDS):

        def split(raw: RawData, fold: int = fold) -> RawData:
            raw = flipped(raw)
            rows = np.random.default_rng(1).permutation(len(raw.train))
            is_held = np.arange(len(rows)) % FOLDS == fold
            train, held = (select_samples(raw.train, np.sort(rows[m])) for m in (~is_held, is_held))
            return replace(raw, train=train, eval=held)

        with tempfile.TemporaryDirectory() as folder, changed_data(split):
            recipe = load_recipe(name, [*keys, *QUIET])
            run(recipe, Path(folder) / "run")
            trained = read_trained_run(Path(folder) / "run")
            dataset = data.load_data(recipe, Reporter(console=Console(file=io.StringIO())))
            held = np.sort(
                np.random.default_rng(1).permutation(len(flipped.labels))[
                    np.arange(len(flipped.labels)) % FOLDS == fold
                ]
            )
            for rows, outputs, _ in evaluated._evaluate_batches(trained, dataset):
                if not probabilities.size:
                    probabilities = np.zeros((len(flipped.labels), outputs.shape[-1]))
                powers = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
                probabilities[held[rows]] = powers / powers.sum(axis=-1, keepdims=True)
    return flipped.rate(-get_label_quality_scores(flipped.labels, probabilities))


def measure_cost(name: str, keys: Sequence[str], steps: int, rounds: int) -> float:
    """Return the processor time of a step with the ledger over the time without it.

    Runs of `steps` and of twice as many alternate; their difference has no compilation.
    """
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for ledger in ("false", "true"):
            for count in (steps, 2 * steps):
                length = ["train.epochs=null", "train.epochs=null", f"train.steps={count}"]
                recipe = load_recipe(name, [*keys, *QUIET, *length, f"train.ledger={ledger}"])
                with tempfile.TemporaryDirectory() as folder:
                    before = time.process_time()
                    run(recipe, Path(folder) / "run")
                    times.setdefault((ledger, count), []).append(time.process_time() - before)
    on, off = (min(times[key, 2 * steps]) - min(times[key, steps]) for key in ("true", "false"))
    return on / off


def main() -> None:
    """Print, and with --save publish, a row for each recipe and share."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", help="folder of MNIST; downloaded without it")
    parser.add_argument("--texts", help="a CSV of other texts for the recipe bert_docstrings")
    parser.add_argument("--only", nargs="*", help="names of rows")
    add_save(parser, "ledger.md")
    args = parser.parse_args()
    recipes = dict(RECIPES)
    if args.texts:
        recipes[f"bert_docstrings, {Path(args.texts).name}"] = (f"dataset.root={args.texts}",)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rows = []
    for title, keys in recipes.items():
        if args.only and title not in args.only:
            continue
        is_mnist = "mnist" in title
        root = [f"dataset.root={args.root}"] if args.root and is_mnist else []
        for share in MNIST_SHARES if is_mnist else SHARES:
            name = title.partition(",")[0]
            flipped = FlippedData(share)
            precision, suggested = rank_by_ledger(name, [*keys, *root], flipped)
            by_folds = rank_by_cleanlab(name, [*keys, *root], flipped)
            count = int((flipped.true != flipped.labels).sum())
            numbers = (f"{x:.3f}" for x in (precision, by_folds, suggested))
            rows.append([title, f"{share:.0%}", f"{count:,}", *numbers])
            print(rows[-1], flush=True)
    titles = ["recipe", "wrong", "k", "ledger", "cleanlab out of fold", "right suggestions"]
    head = heading("Wrong labels", "python -m benchmarks.ledger", ["jax", "cleanlab"])
    publish("\n".join([head, table(titles, rows)]), args.save)


if __name__ == "__main__":
    main()
