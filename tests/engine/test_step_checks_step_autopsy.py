"""The autopsy of a custom step: the operation, its line, and the examples of the batch."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from pipeline.core.errors import RunError
from pipeline.engine.sink import sink
from pipeline.engine.step_checks import examine_step

FILE = Path(__file__).name
BATCH = {"x": np.ones((4, 3), np.float32), "y": np.arange(4, dtype=np.int32)}


def line_of(text: str, function: Any) -> int:
    """Return the number of the line of a function that contains a text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def descend(state: Array, batch: Any) -> tuple[Array, dict[str, Array]]:
    """Return a step of gradient descent on a logarithm."""

    def compute_loss(weights: Array) -> Array:
        return jnp.log(batch["x"] @ weights).mean()

    loss, gradient = jax.value_and_grad(compute_loss)(state)
    return state - gradient, {"accuracy": loss * 0, "loss": loss}


def test_operation_line_and_examples_are_named() -> None:
    x = BATCH["x"].copy()
    x[2] = -1
    text = examine_step(descend, jnp.ones(3), {**BATCH, "x": x})
    assert text.startswith(f"log ({FILE}, line {line_of('jnp.log', descend)}) returned float32 4")
    assert "with 1 NaN" in text
    assert "in 1 of 4 examples: 2; it read dot_general: float32 4, -3 to 3" in text


def test_non_finite_batch_or_state_value_is_named() -> None:
    x = BATCH["x"].copy()
    x[1, 0] = np.nan
    text = examine_step(descend, jnp.ones(3), {**BATCH, "x": x})
    assert re.match(
        r"the step reads batch x: float32 4x3 with 1 NaN.* in 1 of 4 examples: 1$", text
    )
    text = examine_step(descend, jnp.array([1, jnp.inf, 1]), BATCH)
    assert text.startswith("the step reads state: float32 3 with 1 Inf")


@pytest.mark.medium
def test_flax_layer_and_loop_are_named() -> None:
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            return nn.Dense(2, name="head")(x)

    network = Network()
    state = network.init(jax.random.key(0), BATCH["x"])

    def step(state: Any, batch: Any) -> Any:
        logits = network.apply(state, batch["x"]) * 1e30
        total, _ = lax.scan(lambda sum_, row: (sum_ + (row * row).sum(), None), 0.0, logits)
        return state, {"loss": total}

    text = examine_step(step, state, BATCH)
    assert text.startswith(f"mul ({FILE}, line {line_of('row * row', step)}) returned float32 2")
    state = jax.tree.map(lambda leaf: leaf + 3e38, state)
    assert "(head" in examine_step(step, state, BATCH)


def test_finite_loss_is_reported_as_finite() -> None:
    assert examine_step(descend, jnp.ones(3), BATCH) == (
        "one operation at a time the loss is finite"
    )


@pytest.mark.medium
def test_run_ended_by_its_loss_names_the_operation(tmp_path: Path) -> None:
    def step(state: Array, batch: Any) -> tuple[Array, dict[str, Array]]:
        return state - 1, {"loss": jnp.sqrt(state) + 0 * batch["x"].sum()}

    place = re.escape(f"sqrt ({FILE}, line {line_of('jnp.sqrt', step)}) returned float32 scalar")
    with pytest.raises(RunError, match=rf"^step 7 of 20: loss is nan; .*; {place} with 1 NaN"):
        list(sink(step, jnp.float32(5), BATCH, steps=20, batch_size=2, size=4, save=tmp_path))


@pytest.mark.slow
def test_iterator_batch_is_examined_in_any_window() -> None:
    """A dispatch of 300 steps has three windows of at most 128 batches."""

    def step(state: Array, batch: Any) -> tuple[Array, dict[str, Array]]:
        return state + 1, {"loss": jnp.log(batch["x"]).sum()}

    for last in (5, 200, 290):
        batches = ({"x": np.float32([1, number != last - 1])} for number in range(300))
        with pytest.raises(RunError, match=rf"^step {last} of 300: loss is -inf; .* 1 of 2 exampl"):
            list(sink(step, jnp.float32(0), batches, steps=300, size="all"))
