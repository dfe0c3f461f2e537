"""Loops over the batches of a window, of which a backend compiles programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.data.feed.window import Inputs, batch_at
from pipeline.training.metrics import EvalSums
from pipeline.training.state import TrainState
from pipeline.training.step import TrainStep

Repeat = Callable[[Callable[[Any], Array], Callable[[Any], Any], Any], Any]
"""(condition, body, start) -> the carried value at which the condition no longer holds."""


@register_dataclass
@dataclass(frozen=True)
class LoopCarry:
    """Values that the training loop carries: the state, one row of telemetry per step, and whether
    no step has ended the loop."""

    state: TrainState
    telemetry_buffer: Array
    should_continue: Array


def python_loop(unfinished: Callable[[Any], Array], body: Callable[[Any], Any], carry: Any) -> Any:
    """Do as `jax.lax.while_loop` does, not compiled."""
    while unfinished(carry):
        carry = body(carry)
    return carry


def at_most_once(unfinished: Callable[[Any], Array], body: Callable[[Any], Any], carry: Any) -> Any:
    """Do as `jax.lax.while_loop` does for one iteration at most, in no computation of its own.

    The body of a loop, or of a branch, is such a computation, in which XLA:CPU does not use its
    library for a convolution whose dimensions it would have to permute (jax issue 12868).
    """
    proceed = unfinished(carry)
    return jax.tree.map(lambda new, old: jnp.where(proceed, new, old), body(carry), carry)


def train_loop(step: TrainStep, repeat: Repeat) -> Callable[..., LoopCarry]:
    """Training steps at positions first .. last - 1 of a window, up to one that ends the run."""

    def loop(
        carried: LoopCarry, inputs: Inputs, learning_rates: Array, first: Array, last: Array
    ) -> LoopCarry:
        def unfinished(carry: tuple[Array, LoopCarry]) -> Array:
            return (carry[0] < last) & carry[1].should_continue

        def body(carry: tuple[Array, LoopCarry]) -> tuple[Array, LoopCarry]:
            position, before = carry
            state, record = step.step(before.state, batch_at(inputs, position), learning_rates)
            rows = before.telemetry_buffer.at[position].set(jnp.stack(record))
            return position + 1, LoopCarry(state, rows, record.should_continue)

        return repeat(unfinished, body, (first, carried))[1]

    return loop


def eval_loop(step: TrainStep, repeat: Repeat) -> Callable[..., EvalSums]:
    """Evaluation of the batches at positions first .. last - 1 of a window, added to sums."""

    def loop(
        state: TrainState, sums: EvalSums, inputs: Inputs, first: Array, last: Array
    ) -> EvalSums:
        def unfinished(carry: tuple[Array, EvalSums]) -> Array:
            return carry[0] < last

        def body(carry: tuple[Array, EvalSums]) -> tuple[Array, EvalSums]:
            position, before = carry
            return position + 1, step.evaluate(state, batch_at(inputs, position), before)

        return repeat(unfinished, body, (first, sums))[1]

    return loop
