"""`pipeline.sink` against a loop over a jitted step: same step, data and order, in alternation.

    python -m benchmarks.sink_step [--rounds 5] [--seconds 3]

The loop puts all examples on the device once, dispatches `jax.jit(step, donate_argnums=0)` for each
batch, and reads the loss once at the end. The sink logs every step to a new directory.
Times are milliseconds a step, without compilation.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

from benchmarks.custom_components import ConvNet
from pipeline.data.order import SampleOrder
from pipeline.engine.sink import sink

EXAMPLES = 2048


class LeNet(nn.Module):
    """LeNet-5 on 28x28 images."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Return logits."""
        x = nn.max_pool(nn.relu(nn.Conv(6, (5, 5))(x)), (2, 2), (2, 2))
        x = nn.max_pool(nn.relu(nn.Conv(16, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(120)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.relu(nn.Dense(84)(x)))


class ThreeBlocks(nn.Module):
    """Six 3x3 convolutions and three poolings on 32x32 images."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Return logits."""
        for features in (16, 32, 64):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


class Mlp(nn.Module):
    """784-512-512-10."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Return logits."""
        x = nn.relu(nn.Dense(512)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.relu(nn.Dense(512)(x)))


class SmallMlp(nn.Module):
    """784-16-10."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Return logits."""
        return nn.Dense(10)(nn.relu(nn.Dense(16)(x.reshape(len(x), -1))))


TASKS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "LeNet-5, batch 32": (LeNet(), (28, 28, 1), 32),
    "2 convolutions, 32x32, batch 32": (ConvNet(10), (32, 32, 3), 32),
    "6 convolutions, 32x32, batch 32": (ThreeBlocks(), (32, 32, 3), 32),
    "MLP 784-512-512-10, batch 64": (Mlp(), (28, 28, 1), 64),
    "MLP 784-16-10, batch 16": (SmallMlp(), (28, 28, 1), 16),
}


def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
    """Do a step of training."""

    def loss_of(params: Any) -> Any:
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def run_jitted(state: TrainState, data: Any, batch: int) -> Callable[[int], float]:
    """Return a function that times a number of steps in a loop over a jitted step."""
    jitted = jax.jit(step, donate_argnums=0)
    on_device = {name: jax.device_put(column) for name, column in data.items()}
    gather = jax.jit(lambda columns, rows: {name: c[rows] for name, c in columns.items()})
    order = SampleOrder(
        samples=EXAMPLES,
        batch_size=batch,
        drop_remainder=True,
        repeat=1,
        seed=0,
        shuffle=True,
        buffer_size=None,
    )

    def time_ms(steps: int) -> float:
        current: Any = jax.tree.map(lambda leaf: jax.numpy.array(leaf, copy=True), state)
        current, _ = jitted(current, gather(on_device, order.batches(0, 1).indices[0]))
        rows = order.batches(1, steps).indices
        metrics = {"loss": jax.numpy.zeros(())}
        started_at = time.perf_counter()
        for number in range(steps):
            current, metrics = jitted(current, gather(on_device, rows[number]))
        float(metrics["loss"])
        return 1000 * (time.perf_counter() - started_at) / steps

    return time_ms


def run_sunk(state: TrainState, data: Any, batch: int) -> Callable[[int], float]:
    """Return a function that times a number of steps in sinks, after a first one."""

    def time_ms(steps: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            total = 2 * steps
            reports = sink(
                step, state, data, steps=total, size=steps, batch_size=batch, save=Path(folder)
            )
            next(reports)
            started_at = time.perf_counter()
            next(reports)
            seconds = time.perf_counter() - started_at
            list(reports)
        return 1000 * seconds / steps

    return time_ms


def main() -> None:
    """Print a row for each task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    print("| task | jitted loop, ms | sink, ms | ratio of a round |\n| --- | --- | --- | --- |")
    for name, (network, shape, batch) in TASKS.items():
        draw = np.random.default_rng(0)
        data = {"x": draw.normal(size=(EXAMPLES, *shape)).astype(np.float32)}
        data["y"] = draw.integers(0, 10, EXAMPLES).astype(np.int32)
        params = network.init(jax.random.key(0), data["x"][:1])["params"]
        tx = optax.sgd(0.01, momentum=0.9)
        state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
        time_jitted_ms = run_jitted(state, data, batch)
        time_sunk_ms = run_sunk(state, data, batch)
        steps = max(10, int(1000 * options.seconds / time_jitted_ms(10)))
        rounds = [(time_jitted_ms(steps), time_sunk_ms(steps)) for _ in range(options.rounds)]
        cells = [describe(column) for column in zip(*rounds, strict=True)]
        ratios = [loop_ms / sink_ms for loop_ms, sink_ms in rounds]
        print(f"| {name} | {cells[0]} | {cells[1]} | {describe(ratios)} |", flush=True)


def describe(values: Any) -> str:
    """Return the median and the range."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
