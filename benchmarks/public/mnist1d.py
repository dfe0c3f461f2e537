"""MNIST-1D: the authors' convolution network, trained by the recipe `mnist1d_cnn`.

    python -m benchmarks.public mnist1d --save
    python -m benchmarks.public mnist1d --torch 3     # beside the authors' loop

`--torch N` trains one seed of the recipe alone, then one of the authors' loop, N times in turn, so
that both have the same other work beside them. Its seconds are of the loop of 8,000 steps with its
evaluations, without imports and compiling.

Decided before the first run: the accuracy on the 1,000 test series after the last step, and the
seeds 1 to 20. The series are made by the authors' formula, equal to the package mnist1d's
(`tests/golden/make_mnist1d.py`), so no package is needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import add_save, heading, publish, table
from benchmarks.public.figures import (
    CACHE,
    Published,
    SeedRuns,
    compute_p,
    describe_published,
    format_p,
    read_run,
    require_versions,
    train_seeds,
)

SOURCE = "README of greydanus/mnist1d"
PUBLISHED = (
    Published("logistic regression", 0.32, SOURCE),
    Published("MLP", 0.68, SOURCE),
    Published("GRU", 0.91, SOURCE),
    Published("convolution network", 0.94, SOURCE),
    Published("human", 0.96, SOURCE),
)
VERSIONS = {"torch": "2.13.0"}
SEEDS = 20
BATCH_SIZE, STEPS, RATE = 100, 8000, 0.01
HEADER = ["", "accuracy", "seeds", "training, s", "p, ours at least as good", "source"]


def list_rows(ours: SeedRuns, pairs: tuple[SeedRuns, SeedRuns] | None) -> Iterator[list[str]]:
    """Yield a row for each published figure, for single runs of ours and of the authors' loop in
    turn if they ran, and for all seeds of ours."""
    for figure in PUBLISHED:
        p = format_p(compute_p(ours.accuracies, figure))
        yield [figure.method, describe_published(figure), "1", "", p, figure.source]
    names = ("`mnist1d_cnn`, a seed alone", "their network and loop in PyTorch, in turn with it")
    for name, runs in zip(names, pairs or (), strict=pairs is not None):
        count = len(runs.accuracies)
        yield [name, runs.describe(), str(count), f"{runs.train_s / count:.1f} each", "", "here"]
    count = len(ours.accuracies)
    each = f"{ours.train_s / count:.0f} each, in one program"
    yield ["**`mnist1d_cnn`**", f"**{ours.describe()}**", str(count), each, "", "here"]


def train_in_turn(count: int) -> tuple[SeedRuns, SeedRuns]:
    """Train a seed of the recipe alone and a seed of the authors' loop, `count` times in turn.
    Exits with the run's status if it fails."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, count + 1):
            run_dir = Path(folder) / str(seed)
            words = ["+recipe=mnist1d_cnn", f"seed={seed}", f"hydra.run.dir={run_dir}"]
            status = subprocess.run([sys.executable, "-m", "pipeline", *words]).returncode
            if status:
                raise SystemExit(status)
            ours.append(read_run(run_dir))
            theirs.append(train_torch(seed))
    return _gather(ours), _gather(theirs)


def _gather(runs: Sequence[tuple[float, float]]) -> SeedRuns:
    return SeedRuns(tuple(accuracy for accuracy, _ in runs), sum(seconds for _, seconds in runs))


def train_torch(seed: int) -> tuple[float, float]:
    """Train the authors' network with Adam in PyTorch, by their settings: batches in a fixed order,
    no augmentation. Returns the accuracy and the seconds of the loop."""
    import torch
    from torch import nn

    import pipeline
    from pipeline.stages.data import load_data

    dataset = load_data(pipeline.load_recipe("mnist1d_cnn", ["dataset.train.ops=[]"]))

    def read(split: object) -> tuple[torch.Tensor, torch.Tensor]:
        columns = split.columns  # type: ignore[attr-defined]
        series = torch.tensor(columns["series"]).permute(0, 2, 1)
        return series.float(), torch.tensor(columns["label"]).long()

    (inputs, labels), (others, expected) = read(dataset.train), read(dataset.eval)
    torch.manual_seed(seed)
    convolutions: list[nn.Module] = []
    for channels, kernel in ((1, 5), (25, 3), (25, 3)):
        convolutions += [nn.Conv1d(channels, 25, kernel, stride=2, padding=1), nn.ReLU()]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(125, 10))
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    started_at = time.perf_counter()
    for step in range(STEPS):
        first = step * BATCH_SIZE % len(inputs)
        rows = slice(first, first + BATCH_SIZE)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = float((model(others).argmax(1) == expected).float().mean())
    return accuracy, time.perf_counter() - started_at


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.public mnist1d",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, choices=range(1, 101), metavar="1..100")
    parser.add_argument("--torch", type=int, default=0, help="runs beside the authors' loop")
    parser.add_argument("--cache", type=Path, default=CACHE / "mnist1d")
    add_save(parser, "public_mnist1d.md")
    arguments = parser.parse_args()
    if arguments.torch:
        require_versions(VERSIONS)
    ours = train_seeds(["+recipe=mnist1d_cnn"], arguments.seeds, arguments.cache)
    pairs = train_in_turn(arguments.torch) if arguments.torch else None
    command = f"python -m benchmarks.public mnist1d --seeds {arguments.seeds}"
    command += f" --torch {arguments.torch}" if arguments.torch else ""
    text = heading("MNIST-1D", command, ("jax", "jaxlib", "torch"))
    publish(f"{text}\n{table(HEADER, list_rows(ours, pairs))}", arguments.save)


if __name__ == "__main__":
    main()
