"""Pure functions that a backend compiles: loops over the steps of a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.backends.loading.window import Inputs, read_batch
from pipeline.models.modules.name_stack import DATA as DATA_SCOPE
from pipeline.models.modules.name_stack import UPDATE
from pipeline.training.metrics import EvalSums
from pipeline.training.state import Record, TrainState
from pipeline.training.step import TrainStep

Repeat = Callable[[Callable[[Any], Array], Callable[[Any], Any], Any], Any]
"""(condition, body, first carried value) -> the carried value for which the condition is false.
`jax.lax.while_loop`, or a function below."""


@register_dataclass
@dataclass(frozen=True)
class LoopCarry:
    """The state, a row of telemetry for each step, and whether to run the next step."""

    state: Any
    telemetry_buffer: Array
    should_continue: Array


def make_buffers(inputs: Inputs) -> tuple[Array, Array]:
    """Return zeros for telemetry, float32 (steps, fields of `Record`), and True to continue."""
    rows = jnp.zeros((inputs.indices.shape[0], len(Record._fields)), jnp.float32)
    return rows, jnp.asarray(True)


def run_python_loop(
    condition: Callable[[Any], Array], body: Callable[[Any], Any], carry: Any
) -> Any:
    """Run the loop of `jax.lax.while_loop` in Python."""
    while condition(carry):
        carry = body(carry)
    return carry


def run_once(condition: Callable[[Any], Array], body: Callable[[Any], Any], carry: Any) -> Any:
    """Run at most one iteration of `jax.lax.while_loop`, without a loop.

    In the body of a loop or a branch XLA:CPU doesn't use its library for a convolution whose
    dimensions it would have to permute (jax issue 12868).
    """
    proceed = condition(carry)
    return jax.tree.map(lambda new, old: jnp.where(proceed, new, old), body(carry), carry)


def make_train_loop(step: Callable[..., Any], repeat: Repeat) -> Callable[..., LoopCarry]:
    """Return a loop over positions first .. last - 1 of a window, while `should_continue` is true.

    `step` computes (state, batch, learning rates, *constants) -> (state, `Record`). The fields of
    the record are the columns of the telemetry buffer.
    """

    def loop(
        carried: LoopCarry,
        inputs: Inputs,
        learning_rates: Array,
        first: Array,
        last: Array,
        constants: Sequence[Array] = (),
    ) -> LoopCarry:
        def condition(carry: tuple[Array, LoopCarry]) -> Array:
            return (carry[0] < last) & carry[1].should_continue

        def body(carry: tuple[Array, LoopCarry]) -> tuple[Array, LoopCarry]:
            position, before = carry
            with jax.named_scope(DATA_SCOPE):
                batch = read_batch(inputs, position)
            state, record = step(before.state, batch, learning_rates, *constants)
            with jax.named_scope(UPDATE):
                rows = before.telemetry_buffer.at[position].set(jnp.stack(record))
            return position + 1, LoopCarry(state, rows, record.should_continue)

        return repeat(condition, body, (first, carried))[1]

    return loop


def make_eval_loop(step: TrainStep, repeat: Repeat) -> Callable[..., EvalSums]:
    """Return a loop that adds the results of batches first .. last - 1 of a window to sums."""

    def loop(
        state: TrainState,
        sums: EvalSums,
        inputs: Inputs,
        first: Array,
        last: Array,
        constants: Sequence[Array],
    ) -> EvalSums:
        def condition(carry: tuple[Array, EvalSums]) -> Array:
            return carry[0] < last

        def body(carry: tuple[Array, EvalSums]) -> tuple[Array, EvalSums]:
            position, before = carry
            batch = read_batch(inputs, position)
            return position + 1, step.evaluate(state, batch, before, *constants)

        return repeat(condition, body, (first, sums))[1]

    return loop
