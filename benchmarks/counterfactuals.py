"""Counterfactuals of runs, against training without the samples from the start.

    python -m benchmarks.counterfactuals bits [--cases 100] [--first 0] [--seed 0]
    python -m benchmarks.counterfactuals ranks [--rows 100] [--seed 0]

`bits` draws small recipes and rows, and compares the final state of `without` with the final state
of a new run whose recipe leaves the rows out: every array, bit for bit. Of cases with one row it
prints how far into the first epoch the row is read.

`ranks` compares scores of training samples with the truth: by how much the loss of the evaluation
split changes without each sample. The scores are the ledger's (last loss, mean margin, EL2N, times
forgotten) and TracIn's, the sum over checkpoints of the rate times the product of the gradients of
the sample's loss and of the evaluation's (Pruthi et al., Estimating training data influence by
tracing gradient descent, 2020). Rank correlations are Spearman's, with the 95 % interval of 1,000
bootstrap draws.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from scipy.stats import rankdata

from pipeline import load_recipe
from pipeline.checkpoint.checkpoint_folder import FOLDER, list_saved_steps, make_checkpoint_path
from pipeline.checkpoint.restore import arrange_arrays, read_checkpoint
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.data.batch import Batch, read_chunks
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe, make_silent_reporter
from pipeline.inspect.replay import Replay, open_replay
from pipeline.inspect.without import (
    compute_counterfactual,
    find_positions,
    make_recipe,
)
from pipeline.stages.run import run
from pipeline.stages.runner.context import RunOptions
from pipeline.training.losses import compute_losses
from pipeline.training.state import TrainState
from pipeline.training.step import predict

QUIET = ("monitor.tensorboard=false", "checkpoint.keep=50")
NETWORKS = (
    ("model=mlp", "model.hidden=[16]"),
    (
        "model=layers",
        "model.layers=[flatten, {name: dense, features: 16}, relu, {name: dropout, rate: 0.3}, "
        "{name: dense, features: '$classes'}]",
    ),
    ("model=lenet5",),
    (
        "model=layers",
        "model.layers=[{name: conv, features: 4, kernel: 3}, batch_norm, relu, flatten, "
        "{name: dense, features: '$classes'}]",
    ),
)
SHARES = (0.4, 0.3, 0.05, 0.25)
"""Probabilities of the networks; LeNet-5 takes long to compile."""
OPTIMIZERS = ("momentum", "adam", "adamw", "sgd", "lamb")
EXTRAS = (
    (),
    ("train.ema.decay=0.9",),
    ("train.accumulate_steps=2",),
    ("parallel.mode=data", "parallel.devices=1", "parallel.shards=2"),
    ("train.clip.norm=0.5",),
    ("train.loss.hardest_share=0.5",),
    ("train.ledger=true",),
    ("train.precision=bf16",),
)
BATCH_SIZES = (8, 16, 32)
STEPS = 40
SAVED = "checkpoint.every_steps=10"
BOOTSTRAPS = 1000


def train(recipe: Any, run_dir: Path) -> None:
    run(recipe, RunOptions(run_dir=run_dir, console=Console(file=io.StringIO())))


def draw_recipe(rng: np.random.Generator) -> list[str]:
    """Return overrides of a small recipe."""
    network = NETWORKS[rng.choice(len(NETWORKS), p=SHARES)]
    return [
        *network,
        f"optimizer={OPTIMIZERS[rng.integers(len(OPTIMIZERS))]}",
        "train.optimizer.lr=0.003",
        *EXTRAS[rng.integers(len(EXTRAS))],
        f"train.batch_size={BATCH_SIZES[rng.integers(len(BATCH_SIZES))]}",
        f"train.steps={STEPS}",
        f"seed={rng.integers(1000)}",
        f"train.sink_size={rng.choice([-1, 1, 7, 50])}",
        SAVED,
        *QUIET,
    ]


def check_bits(cases: int, first: int, seed: int) -> int:
    """Print a line for each case, from number `first` on; return how many have other bits."""
    failures = 0
    firsts = []
    for case in range(first, first + cases):
        rng = np.random.default_rng((seed, case))
        overrides = draw_recipe(rng)
        began_at = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            run_dir, oracle_dir = Path(folder) / "run", Path(folder) / "oracle"
            recipe = load_recipe("lenet5_digits", overrides)
            train(recipe, run_dir)
            with open_replay(run_dir, make_silent_reporter()) as replay:
                split = replay.opened.dataset.train
                read = replay.opened.dataset.train_order.batches(0, STEPS).rows
                # Rows that the run reads, one in half of the cases.
                count = 1 if case % 2 == 0 else int(rng.integers(2, 40))
                rows = rng.choice(np.unique(read), min(count, len(np.unique(read))), replace=False)
                positions = find_positions(split, split.list_rows()[rows])
                result = compute_counterfactual(replay, positions, STEPS)
                steps_per_epoch = replay.opened.dataset.train_order.steps_per_epoch
            train(make_recipe(recipe, positions), oracle_dir)
            expected = read_checkpoint(make_checkpoint_path(oracle_dir / FOLDER, STEPS)).arrays
            actual = flatten_by_path(result.other)
            is_equal = set(actual) == set(expected) and all(
                np.array_equal(np.asarray(actual[path]), expected[path], equal_nan=True)
                for path in expected
            )
        if count == 1:
            firsts.append((result.saved_steps, min(steps_per_epoch, STEPS)))
        failures += not is_equal
        words = " ".join(word for word in overrides if word not in (*QUIET, SAVED))
        print(
            f"{case}\t{'equal' if is_equal else 'OTHER'}\t{len(positions)} rows\tsaved "
            f"{result.saved_steps}\t{time.perf_counter() - began_at:.1f} s\t{words}",
            flush=True,
        )
    print(f"equal bits: {cases - failures} of {cases}")
    if firsts:
        saved, possible = map(np.array, zip(*firsts, strict=True))
        print(
            f"one row, {len(firsts)} cases: read after {np.mean(saved / possible):.3f} of the "
            "steps of an epoch, or of the run if it is shorter"
        )
    return failures


def rank(rows: int, seed: int) -> None:
    """Print the rank correlation of each score with the truth."""
    rng = np.random.default_rng(seed)
    overrides = (
        *NETWORKS[0], "optimizer=momentum", "train.optimizer.lr=0.05", "train.batch_size=16",
        "train.steps=400", "train.ledger=true", "checkpoint.every_steps=40", f"seed={seed}", *QUIET,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        train(load_recipe("lenet5_digits", overrides), run_dir)
        with open_replay(run_dir, make_silent_reporter()) as replay:
            chosen = np.sort(rng.choice(len(replay.opened.dataset.train), rows, replace=False))
            truth = np.array([_measure_change(replay, row) for row in chosen])
            scores = {**_read_ledger(replay, chosen), "TracIn": _trace(replay, chosen)}
    print(f"seed {seed}, {rows} rows: the loss without a row changes by {np.std(truth):.2g}")
    print("| score | rank correlation | 95 % |")
    print("| --- | ---: | ---: |")
    for name, score in scores.items():
        draws = rng.integers(rows, size=(BOOTSTRAPS, rows))
        values = [correlate(truth[draw], score[draw]) for draw in draws]
        low, high = np.quantile(values, [0.025, 0.975])
        print(f"| {name} | {correlate(truth, score):.2f} | {low:.2f} to {high:.2f} |")


def correlate(truth: np.ndarray, score: np.ndarray) -> float:
    """Return Spearman's rank correlation; 0 if one side is constant."""
    one, other = rankdata(truth), rankdata(score)
    if one.std() == 0 or other.std() == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _measure_change(replay: Replay, row: int) -> float:
    result = compute_counterfactual(replay, np.array([row]), 400)
    return result.other_metrics["loss"] - result.metrics["loss"]


def _read_ledger(replay: Replay, rows: np.ndarray) -> dict[str, np.ndarray]:
    ledger = replay.go_to(400).features["ledger"]
    readings = np.maximum(np.asarray(ledger.readings), 1)
    early = np.minimum(readings, 5)
    return {
        "ledger: last loss": np.asarray(ledger.loss)[rows],
        "ledger: mean margin": (np.asarray(ledger.margin_sum) / readings)[rows],
        "ledger: EL2N": (np.asarray(ledger.early_gradient_sum) / early)[rows],
        "ledger: times forgotten": np.asarray(ledger.forgotten)[rows],
    }


def _trace(replay: Replay, rows: np.ndarray) -> np.ndarray:
    """Return TracIn's score of each row over the checkpoints of a run."""
    opened = replay.opened
    total = np.zeros(len(rows))
    root = replay.run_dir / FOLDER
    for step in list_saved_steps(root):
        checkpoint = read_checkpoint(make_checkpoint_path(root, step))
        state = arrange_arrays(checkpoint.folder, checkpoint.arrays, opened.built.state)
        rate = float(np.asarray(opened.built.learning_rates[step - 1]).reshape(-1)[0])
        gradient = jax.jit(partial(_differentiate, opened, state))
        evaluation = 0.0
        count = len(opened.dataset.eval)
        for batch, number in read_chunks(opened.dataset.eval, np.arange(count), 0, 64):
            weights = np.arange(64) < number
            evaluation = evaluation + gradient(batch, jnp.asarray(weights)) / count
        for position, row in enumerate(rows):
            (batch, _), *_ = read_chunks(opened.dataset.train, np.array([row]), 0, 1)
            total[position] += rate * float(gradient(batch, jnp.ones(1)) @ evaluation)
    return total


def _differentiate(
    opened: OpenedRecipe, state: TrainState, batch: Batch, weights: jax.Array
) -> jax.Array:
    """Return the gradient of the weighted sum of a batch's losses by all parameters, (p,)."""
    config = opened.built.step_config

    def compute(params: Any) -> jax.Array:
        logits, labels = predict(config, {**state.variables, "params": params}, batch)
        return (compute_losses(config, logits, labels) * weights).sum()

    gradients = jax.grad(compute)(state.params)
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(gradients)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["bits", "ranks"])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "bits":
        raise SystemExit(1 if check_bits(args.cases, args.first, args.seed) else 0)
    rank(args.rows, args.seed)


if __name__ == "__main__":
    main()
