"""MNIST-1D: the authors' convolution network, trained by the recipe `mnist1d_cnn`.

    python -m benchmarks.public mnist1d --save
    python -m benchmarks.public mnist1d --torch 2     # the authors' loop too; needs torch

Decided before the first run: the accuracy on the 1,000 test series after the last step, and the
seeds 1 to 20. The series are made by the authors' formula, equal to the package mnist1d's
(`tests/golden/make_mnist1d.py`), so no package is needed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import add_save, heading, publish, table
from benchmarks.public.figures import (
    CACHE,
    Published,
    SeedRuns,
    compute_p,
    describe_published,
    format_p,
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
SEEDS = 20
BATCH_SIZE, STEPS, RATE = 100, 8000, 0.01
HEADER = ["", "accuracy", "seeds", "training, s", "p, ours at least as good", "source"]


def list_rows(ours: SeedRuns, peer: SeedRuns | None) -> Iterator[list[str]]:
    """Yield a row for each published figure, for the authors' loop if it ran, and for ours."""
    for figure in PUBLISHED:
        p = format_p(compute_p(ours.accuracies, figure))
        yield [figure.method, describe_published(figure), "1", "", p, figure.source]
    if peer is not None:
        count = len(peer.accuracies)
        each = f"{peer.train_s / count:.0f} each"
        yield ["their network and loop, in PyTorch", peer.describe(), str(count), each, "", "here"]
    count = len(ours.accuracies)
    each = f"{ours.train_s / count:.0f} each, in one program"
    yield ["**`mnist1d_cnn`**", f"**{ours.describe()}**", str(count), each, "", "here"]


def train_torch(seeds: int) -> SeedRuns:
    """Train the authors' network with Adam in PyTorch, by their settings: batches in a fixed order,
    no augmentation. Returns accuracies and seconds."""
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
    accuracies, started_at = [], time.perf_counter()
    for seed in range(1, seeds + 1):
        torch.manual_seed(seed)
        convolutions: list[nn.Module] = []
        for channels, kernel in ((1, 5), (25, 3), (25, 3)):
            convolutions += [nn.Conv1d(channels, 25, kernel, stride=2, padding=1), nn.ReLU()]
        model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(125, 10))
        optimizer = torch.optim.Adam(model.parameters(), RATE)
        for step in range(STEPS):
            rows = slice(
                step * BATCH_SIZE % len(inputs), step * BATCH_SIZE % len(inputs) + BATCH_SIZE
            )
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracies.append(float((model(others).argmax(1) == expected).float().mean()))
    return SeedRuns(tuple(accuracies), time.perf_counter() - started_at)


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.public mnist1d",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, choices=range(1, 101), metavar="1..100")
    parser.add_argument("--torch", type=int, default=0, help="seeds of the authors' loop")
    parser.add_argument("--cache", type=Path, default=CACHE / "mnist1d")
    add_save(parser, "public_mnist1d.md")
    arguments = parser.parse_args()
    ours = train_seeds(["+recipe=mnist1d_cnn"], arguments.seeds, arguments.cache)
    peer = train_torch(arguments.torch) if arguments.torch else None
    command = f"python -m benchmarks.public mnist1d --seeds {arguments.seeds}"
    command += f" --torch {arguments.torch}" if arguments.torch else ""
    text = heading("MNIST-1D", command, ("jax", "jaxlib", "torch"))
    publish(f"{text}\n{table(HEADER, list_rows(ours, peer))}", arguments.save)


if __name__ == "__main__":
    main()
