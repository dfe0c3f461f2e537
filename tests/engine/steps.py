"""Small custom steps, for tests of `sink`; run as a script it is a process to kill."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.engine.sink import sink

STEPS, BATCH = 60, 16


def make_data(examples: int = 200) -> dict[str, np.ndarray]:
    """Return inputs (examples, 4) and what a linear model has to learn of them."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(examples, 4)).astype(np.float32)
    return {"x": x, "y": x @ np.float32([1, -2, 3, 0.5])}


def make_state() -> dict[str, Any]:
    """Return parameters, a random key and a counter that is a Python number."""
    return {"w": jnp.zeros(4), "key": jax.random.key(3), "count": 0}


def step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Do a step of SGD with noise on the inputs."""
    key, now = jax.random.split(state["key"])
    x = batch["x"] + 0.01 * jax.random.normal(now, batch["x"].shape)

    def loss_of(w: Any) -> Any:
        return jnp.mean(jnp.square(x @ w - batch["y"]))

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    after = {"w": state["w"] - 0.05 * gradient, "key": key, "count": state["count"] + 1}
    return after, {"loss": loss, "norm": jnp.linalg.norm(gradient), "first": batch["y"][0]}


def batches(stop: int | None = None, fail_at: int | None = None) -> Any:
    """Yield batches, the same in every process."""
    data, number = make_data(), 0
    while number != stop:
        if number == fail_at:
            raise OSError("the disk is gone")
        rows = np.random.default_rng(number).integers(0, 200, BATCH)
        yield {name: column[rows] for name, column in data.items()}
        number += 1


if __name__ == "__main__":
    # The kind of data, a folder and a size for each run, and whether to wait after each sink.
    kind, *runs = sys.argv[1:]
    waits = runs[-1] == "wait"
    arrays = kind == "arrays"
    for folder, size in zip(runs[::2], runs[1::2], strict=False):
        for report in sink(
            step,
            make_state(),
            make_data() if arrays else batches(),
            steps=STEPS,
            size=int(size),
            save=Path(folder),
            batch_size=BATCH if arrays else None,
            save_every=9,
        ):
            print(report.step, flush=True)
            if waits:
                input()
