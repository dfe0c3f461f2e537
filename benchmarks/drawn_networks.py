"""The step time of small networks that are drawn by a seed, each written in four ways.

    python -m benchmarks.drawn_networks --networks 20 --seed 1

A network has one to three convolutions of 8 to 48 features, with strides or max pooling, and a
dense layer, on random images of 32x32x3 in batches of 32. It is written as layers in YAML, as
`model=flax`, as a `ModelSpec`, and as a `jax.jit` of a step with optax. The four have their rounds
in turn. A ratio is a way's median against the network's fastest way. On a busy machine processor
time says more than time by the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.custom_components import DrawnNet
from benchmarks.custom_networks import (
    BATCH,
    COMPONENTS,
    MOMENTUM,
    PACKAGES,
    PLAIN,
    RATE,
    Plain,
    Trained,
)
from benchmarks.measure import add_save, heading, publish, table
from pipeline.core.plugins.loading import export_plugins

Drawn = tuple[tuple[int, int, int, int], ...]
"""Features, edge of the kernel, stride, and 1 if pooling follows, of each convolution."""
DATA = (
    "dataset=synthetic",
    "dataset.like=cifar10",
    "dataset.train_size=1024",
    "dataset.eval_size=256",
)


def draw_network(seed: int, number: int) -> Drawn:
    """Return a network, a function of both numbers."""
    random = np.random.default_rng((seed, number))
    convolutions = []
    for _ in range(random.integers(1, 4)):
        stride = int(random.integers(1, 3))
        pools = int(stride == 1 and random.integers(2))
        features, edge = int(random.choice((8, 16, 24, 32, 48))), int(random.choice((3, 5)))
        convolutions.append((features, edge, stride, pools))
    return tuple(convolutions)


def format_layers(network: Drawn) -> str:
    """Return the value of `model.layers`."""
    layers = []
    for features, edge, stride, pools in network:
        layers.append(
            f"{{name: conv, features: {features}, kernel: {edge}, stride: {stride}, bias: true}}"
        )
        layers += ["relu", *(["{name: max_pool, kernel: 2}"] if pools else [])]
    return f"[{', '.join([*layers, 'flatten', '{name: dense, features: $classes}'])}]"


def make_ways(network: Drawn, steps: int, rounds: int) -> Mapping[str, Callable[[], float]]:
    """Return what trains some steps in each way, compiled."""
    text = str([list(convolution) for convolution in network])
    keys = {
        "layers in YAML": ("model=layers", f"model.layers={format_layers(network)}"),
        "model=flax": (
            "model=flax",
            f"model.import={COMPONENTS}:DrawnNet",
            f"model.arguments={{classes: $classes, convolutions: {text}}}",
        ),
        "ModelSpec": ("model.name=drawn_conv_net", f"model.convolutions={text}"),
    }
    overrides = [*DATA, "train.epochs=null", f"train.steps={steps * (rounds + 1)}"]
    overrides += [f"train.batch_size={BATCH}", "optimizer=momentum"]
    overrides += [f"train.optimizer.lr={RATE}", f"train.optimizer.momentum={MOMENTUM}"]
    ways: dict[str, Callable[[], float]] = {}
    for name, written in keys.items():
        trained = Trained(written, overrides, steps)
        ways[name] = trained
    module = DrawnNet(len(trained.dataset.classes), network)
    ways[PLAIN] = Plain(trained.recipe, trained.dataset, steps, module)
    return ways


def measure(ways: Mapping[str, Callable[[], float]], rounds: int, steps: int) -> list[list[str]]:
    """Return rows of a table: milliseconds a step by the clock and of the processor."""
    clock: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, train in ways.items():
            before_s = time.process_time()
            clock[name].append(train())
            processor[name].append(1000 * (time.process_time() - before_s) / steps)
    times = {name: [statistics.median(kind[name]) for kind in (clock, processor)] for name in ways}
    fastest = [min(kinds[i] for kinds in times.values()) for i in range(2)]
    return [
        [
            name,
            *(f"{ms:.2f} ({ms / least:.2f}x)" for ms, least in zip(kinds, fastest, strict=True)),
        ]
        for name, kinds in times.items()
    ]


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first network")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    add_save(parser, "drawn_networks.md")
    args = parser.parse_args()
    export_plugins([COMPONENTS])
    rows = []
    for number in range(args.first, args.first + args.networks):
        network = draw_network(args.seed, number)
        text = ", ".join(f"{f}: {k}x{k}/{s}{' pool' * p}" for f, k, s, p in network)
        measured = measure(make_ways(network, args.steps, args.rounds), args.rounds, args.steps)
        rows += [[str(number), text, *row] for row in measured]
        print(f"{number}: {text}: {measured}", flush=True)
    header = ("", "network", "written as", "ms a step", "ms of the processor")
    what = f"--networks {args.networks} --first {args.first} --seed {args.seed}"
    what += f" --steps {args.steps} --rounds {args.rounds}"
    title = heading("Drawn networks", f"python -m benchmarks.drawn_networks {what}", PACKAGES)
    publish(f"{title}\n{table(header, rows)}", args.save)


if __name__ == "__main__":
    main()
