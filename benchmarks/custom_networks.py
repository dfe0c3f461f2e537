"""The step time of one network, written in several ways.

    python -m benchmarks.custom_networks

Two convolutions, max pooling after each, and a dense layer, on digits of 32x32 in batches of 32:
layers in YAML, `model=flax`, a `ModelSpec` that builds the flax module, and `model=torch` if torch
is installed. The pipeline trains each in one sink. The last one is a `jax.jit` of a step with
optax, one dispatch a step without waiting, on the same images, resized beforehand.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import Array
from rich.console import Console

from benchmarks.custom_components import ConvNet
from benchmarks.measure import add_save, alternate, heading, publish, table
from pipeline import load_recipe
from pipeline.backends.base import Executable
from pipeline.config.recipe import Recipe
from pipeline.core.plugins.loading import export_plugins
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.data.transform import apply_ops
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data
from pipeline.stages.lower import lower

PACKAGES = ("jax", "jaxlib", "flax", "optax")
THIS = "benchmarks.custom_networks"
COMPONENTS = "benchmarks.custom_components"
BATCH = 32
RATE = 0.01
MOMENTUM = 0.9
LAYERS = (
    "[{name: conv, features: 16, kernel: 3, bias: true}, relu, {name: max_pool, kernel: 2},"
    "{name: conv, features: 32, kernel: 3, bias: true}, relu, {name: max_pool, kernel: 2},"
    "flatten, {name: dense, features: $classes}]"
)
RECIPES = {
    "layers in YAML": ("model=layers", f"model.layers={LAYERS}"),
    "model=flax": ("model=flax", f"model.import={COMPONENTS}:ConvNet"),
    "ModelSpec": ("model.name=custom_conv_net",),
    "model=torch": (
        "model=torch",
        f"model.import={COMPONENTS}:torch_conv_net",
        "model.arguments={channels: 1, classes: $classes}",
    ),
}
PLAIN = "flax module, plain jax.jit"


class Trained:
    """A recipe, compiled and trained round by round."""

    def __init__(self, keys: tuple[str, ...], overrides: list[str], steps: int) -> None:
        recipe = load_recipe("lenet5_digits", [*overrides, *keys])
        self._steps = steps
        with Reporter(console=Console(file=open(os.devnull, "w"))) as reporter:
            self.recipe = recipe
            self.dataset = load_data(recipe, reporter)
            backend = recipe.device.open(recipe.parallel)
            built = build(recipe, self.dataset, reporter)
            built = lower(recipe, self.dataset, built, backend, None, reporter)
            self._executable: Executable = compile_programs(
                recipe, self.dataset, built, backend, reporter
            )
        self._state = self._executable.init()
        self._done = 0
        self()

    def __call__(self) -> float:
        """Train some steps more, and return the milliseconds of one."""
        stop = self._done + self._steps
        started_at = time.perf_counter()
        self._state, _ = self._executable.run(self._state, self._done, stop, "loop")
        self._done = stop
        return 1000 * (time.perf_counter() - started_at) / self._steps


class Plain:
    """The module under `jax.jit`, as a short script trains it."""

    def __init__(
        self, recipe: Recipe, dataset: Dataset, steps: int, module: nn.Module | None = None
    ) -> None:
        self._images, self._labels = _map_images(recipe, dataset)
        self._steps = steps
        self._generator = np.random.default_rng(0)
        module = module or ConvNet(len(dataset.classes))
        optimizer = optax.sgd(RATE, MOMENTUM)
        self._params = module.init(jax.random.key(0), self._images[:1])
        self._moments = optimizer.init(self._params)
        self._step = jax.jit(partial(_step, module, optimizer), donate_argnums=(0, 1))
        self()

    def __call__(self) -> float:
        """Train some steps more, and return the milliseconds of one."""
        rows = self._generator.integers(len(self._labels), size=(self._steps, BATCH))
        started_at = time.perf_counter()
        losses = []
        for row in rows:
            self._params, self._moments, loss = self._step(
                self._params, self._moments, self._images, self._labels, row
            )
            losses.append(loss)
        jax.block_until_ready(losses)
        return 1000 * (time.perf_counter() - started_at) / self._steps


def _step(
    module: nn.Module,
    optimizer: optax.GradientTransformation,
    params: Any,
    moments: Any,
    images: Array,
    labels: Array,
    rows: Array,
) -> tuple[Any, Any, Array]:
    def loss_of(params: Any) -> Array:
        logits: Any = module.apply(params, images[rows])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, moments = optimizer.update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments, loss


def _map_images(recipe: Recipe, dataset: Dataset) -> tuple[Array, Array]:
    """Return all training images after the map ops, float32, and their labels."""
    columns = {name: jnp.asarray(values) for name, values in dataset.train.columns.items()}
    number = jnp.arange(len(dataset.train), dtype=jnp.uint32)
    seed = jnp.zeros(2, jnp.uint32)
    mapped = apply_ops(jnp, dataset.train_ops, columns, seed, jnp.uint32(0), number)
    return mapped["image"].astype(jnp.float32), mapped["label"]


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=11)
    add_save(parser, "custom_networks.md")
    parser.add_argument("overrides", nargs="*", help="of all recipes, as autotune=off")
    args = parser.parse_args()
    export_plugins([COMPONENTS])
    total = args.steps * (args.rounds + 1)
    overrides = ["train.epochs=null", "train.epochs=null", f"train.steps={total}"]
    overrides += [f"train.batch_size={BATCH}", "optimizer=momentum", *args.overrides]
    overrides += [f"train.optimizer.lr={RATE}", f"train.optimizer.momentum={MOMENTUM}"]
    contestants: dict[str, Callable[[], float]] = {}
    for name, keys in RECIPES.items():
        if name == "model=torch" and importlib.util.find_spec("torch") is None:
            print("torch is not installed: without model=torch")
            continue
        trained = Trained(keys, overrides, args.steps)
        contestants[name] = trained
    contestants[PLAIN] = Plain(trained.recipe, trained.dataset, args.steps)
    times = alternate(contestants, args.rounds)
    base = times["layers in YAML"]
    rows = []
    for name, rounds in times.items():
        ratios = [ms / base_ms for ms, base_ms in zip(rounds, base, strict=True)]
        rows.append(
            [
                name,
                f"{statistics.median(rounds):.3f}",
                f"{min(rounds):.3f} to {max(rounds):.3f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            ]
        )
    header = ("network", "ms/step, median", "range", "against YAML in the same round")
    what = f"--steps {args.steps} --rounds {args.rounds} {' '.join(args.overrides)}".rstrip()
    title = heading("One network, written in several ways", f"python -m {THIS} {what}", PACKAGES)
    publish(
        f"{title}\n{args.rounds} rounds of {args.steps} steps.\n\n{table(header, rows)}", args.save
    )


if __name__ == "__main__":
    main()
