"""The quick-start MLP of the documents (M-04): accuracy after each of two epochs over MNIST.

    python -m benchmarks.quickstart ours --root DIR >> RESULTS
    python -m benchmarks.quickstart mindspore --root DIR >> RESULTS    # with MindSpore 2.10
    python -m benchmarks.quickstart table RESULTS

Trains the recipe `mlp_quickstart` with each seed and initialiser, and the same in MindSpore: batch
64 of the images in their order, with the last batch of an epoch, plain SGD of 0.01. Images aren't
shuffled, so a seed varies only the initial weights. Each training prints one JSON line: framework,
initialiser, seed, and (accuracy, mean loss) on the 10,000 test images after each epoch. `table`
prints the medians and ranges in Markdown beside the figures of the documents.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

Course = list[tuple[float, float]]
"""Accuracy and mean loss after each epoch."""

NORMAL = "Normal(0.01), biases 0"
UNIFORM = "uniform in 1 / sqrt(inputs)"
INITIALISERS: Mapping[str, tuple[str, ...]] = {
    NORMAL: (),
    UNIFORM: (
        "model.init.dense=he_uniform",
        "model.init.rules=[{pattern: dense_0/bias, init: {name: uniform, scale: 0.03571429}}, "
        "{pattern: dense_1/bias, init: {name: uniform, scale: 0.04419417}}, "
        "{pattern: dense_2/bias, init: {name: uniform, scale: 0.04419417}}]",
    ),
}
"""Overrides of the recipe: the initial weights of nn.Dense in MindSpore 1.x, and in 2.x, which also
draws uniform biases."""
DOCUMENTS: Course = [(0.853, 0.528851), (0.902, 0.334850)]
BATCH = 64
RATE = 0.01


def main() -> None:
    """Train and print lines, or print the table of such lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("side", choices=("ours", "mindspore", "table"))
    parser.add_argument("results", nargs="?", type=Path, help="lines to make a table of")
    parser.add_argument("--root", type=Path, help="folder of MNIST's four files")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--shuffle", action="store_true", help="another order in each epoch")
    args = parser.parse_args()
    if args.side == "table":
        print("\n".join(table(args.results.read_text(encoding="utf-8").splitlines())))
        return
    train = {"ours": train_ours, "mindspore": train_mindspore}[args.side]
    for name in INITIALISERS:
        for seed in map(int, args.seeds.split(",")):
            course = train(args.root, name, seed, args.shuffle)
            order = ", shuffled" if args.shuffle else ""
            line = {"framework": args.side, "init": name + order, "seed": seed, "course": course}
            print(json.dumps(line), flush=True)


def train_ours(root: Path, initialiser: str, seed: int, shuffle: bool) -> Course:
    """Train the recipe with this project."""
    from pipeline import load_recipe, run
    from pipeline.engine.monitors.log_lines import EVALS

    quiet = ["monitor.tensorboard=false", "monitor.loss_every=0", "checkpoint.keep=1"]
    keys = [f"dataset.root={root}", f"seed={seed}", *quiet, *INITIALISERS[initialiser]]
    keys.append(f"dataset.train.shuffle={str(shuffle).lower()}")
    with tempfile.TemporaryDirectory() as folder:
        run(load_recipe("mlp_quickstart", keys), Path(folder))
        lines = (Path(folder) / EVALS).read_text(encoding="utf-8").splitlines()
    return [(line["accuracy"], line["loss"]) for line in map(json.loads, lines)]


def train_mindspore(root: Path, initialiser: str, seed: int, shuffle: bool) -> Course:
    """Train the same network in MindSpore, in graph mode."""
    import mindspore
    from mindspore import Tensor, nn

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("CPU")
    mindspore.set_seed(seed)
    sizes = (784, 512, 512, 10)
    dense = [nn.Dense(n, m, **_make_dense_options(initialiser)) for n, m in pairwise(sizes)]
    network = nn.SequentialCell(dense[0], nn.ReLU(), dense[1], nn.ReLU(), dense[2])
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    cell = nn.TrainOneStepCell(
        nn.WithLossCell(network, loss), nn.SGD(network.trainable_params(), RATE)
    )
    images, labels = _read_mnist(root, "train")
    generator = np.random.default_rng(seed)
    test_images, test_labels = _read_mnist(root, "t10k")
    course = []
    for _ in range(2):
        cell.set_train()
        rows = generator.permutation(len(images)) if shuffle else np.arange(len(images))
        for start in range(0, len(images), BATCH):
            batch = rows[start : start + BATCH]
            cell(Tensor(images[batch]), Tensor(labels[batch]))
        network.set_train(mode=False)
        logits = network(Tensor(test_images)).asnumpy().astype(np.float64)
        highest = logits.max(axis=1, keepdims=True)
        total = np.log(np.exp(logits - highest).sum(axis=1)) + highest[:, 0]
        losses = total - logits[np.arange(len(logits)), test_labels]
        accuracy = (logits.argmax(axis=1) == test_labels).mean()
        course.append((float(accuracy), float(losses.mean())))
    return course


def _make_dense_options(initialiser: str) -> dict[str, Any]:
    """Return the arguments of nn.Dense; without any it initialises as MindSpore 2.x."""
    if initialiser != NORMAL:
        return {}
    from mindspore.common.initializer import Normal

    return {"weight_init": Normal(0.01), "bias_init": "zeros"}


def _read_mnist(root: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Read images float32 (n, 784), normalised as by the recipe, and labels int32 (n,)."""
    image_file, label_file = (
        _read_bytes(root / f"{split}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")
    )
    pixels = np.frombuffer(image_file, np.uint8, offset=16).reshape(-1, 784)
    images = (pixels.astype(np.float32) / np.float32(255) - np.float32(0.1307)) / np.float32(0.3081)
    return images, np.frombuffer(label_file, np.uint8, offset=8).astype(np.int32)


def _read_bytes(file: Path) -> bytes:
    packed = file.with_name(f"{file.name}.gz")
    return gzip.decompress(packed.read_bytes()) if packed.exists() else file.read_bytes()


def table(lines: list[str]) -> Iterator[str]:
    """Yield the rows of a Markdown table: medians over the seeds, and ranges."""
    courses: dict[tuple[str, str], list[Course]] = {}
    for line in map(json.loads, filter(None, lines)):
        courses.setdefault((line["framework"], line["init"]), []).append(line["course"])
    yield "| | initial weights | accuracy after epoch 1 | loss | accuracy after epoch 2 | loss |"
    yield "| --- | --- | --- | --- | --- | --- |"
    cells = " | ".join(f"{accuracy:.1%} | {loss:.3f}" for accuracy, loss in DOCUMENTS)
    yield f"| the documents | not said | {cells} |"
    for (framework, init), runs in courses.items():
        cells = " | ".join(
            _format_spread([run[epoch][column] for run in runs], form)
            for epoch in (0, 1)
            for column, form in enumerate(("{:.2%}", "{:.3f}"))
        )
        yield f"| {framework}, {len(runs)} seeds | {init} | {cells} |"


def _format_spread(values: list[float], form: str) -> str:
    middle, low, high = map(form.format, (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


if __name__ == "__main__":
    main()
