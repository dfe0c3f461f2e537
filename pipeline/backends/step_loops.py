"""Loops over the steps of a window, as pure functions to compile, and the dispatches of a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.backends.loading.loader import Loader
from pipeline.backends.loading.window import Inputs, read_batch
from pipeline.data.batch import Batch
from pipeline.models.modules.name_stack import DATA as DATA_SCOPE
from pipeline.models.modules.name_stack import UPDATE
from pipeline.training.metrics import EvalSums
from pipeline.training.state import TrainState
from pipeline.training.step import TrainStep

Repeat = Callable[[Callable[[Any], Array], Callable[[Any], Any], Any], Any]
"""Function from a condition, a body and the first carry to the last carry: `jax.lax.while_loop`, or
`run_python_loop` or `run_once`."""


@register_dataclass
@dataclass(frozen=True)
class LoopCarry:
    """Values that an iteration of the training loop passes to the next."""

    state: Any
    telemetry_buffer: Array
    """Row of telemetry for each position of a window, float32 (positions, columns)."""
    should_continue: Array
    """Whether to run the next step, bool ()."""


def make_buffers(inputs: Inputs, columns: int) -> tuple[Array, Array]:
    """Return zeros for telemetry, float32 (steps, columns), and True to continue."""
    rows = jnp.zeros((inputs.indices.shape[0], columns), jnp.float32)
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

    In the body of a loop or a branch, XLA:CPU computes some convolutions slowly: those whose
    dimensions it would have to permute for its library (jax issue 12868).
    """
    proceed = condition(carry)
    return jax.tree.map(lambda new, old: jnp.where(proceed, new, old), body(carry), carry)


def make_train_loop(step: Callable[..., Any], repeat: Repeat) -> Callable[..., LoopCarry]:
    """Return a loop over positions first .. last - 1 of a window, while `should_continue` is true.

    `step(state, batch, learning rates, *constants)` returns a state and a `Record`, whose columns
    are in the telemetry buffer.
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
                rows = before.telemetry_buffer.at[position].set(record.stack_row())
            return position + 1, LoopCarry(state, rows, record.should_continue)

        return repeat(condition, body, (first, carried))[1]

    return loop


def make_eval_loop(step: TrainStep, repeat: Repeat) -> Callable[..., EvalSums]:
    """Return a loop that adds the results of batches first .. last - 1 of a window to sums.

    An iteration reads the batch of the next one. XLA would fuse the reading with the network, and
    round differently if the batches come from a whole split.
    """

    def loop(
        state: TrainState,
        sums: EvalSums,
        inputs: Inputs,
        first: Array,
        last: Array,
        constants: Sequence[Array],
    ) -> EvalSums:
        def condition(carry: tuple[Array, Batch, EvalSums]) -> Array:
            return carry[0] < last

        def body(carry: tuple[Array, Batch, EvalSums]) -> tuple[Array, Batch, EvalSums]:
            position, batch, before = carry
            after = step.evaluate(state, batch, before, *constants)
            return position + 1, read_batch(inputs, position + 1), after

        return repeat(condition, body, (first, read_batch(inputs, first), sums))[2]

    return loop


def split_at_windows(loader: Loader, start: int, stop: int) -> Iterator[tuple[Inputs, range]]:
    """Yield each window's inputs and the positions in it of steps `start + 1 .. stop`."""
    while start < stop:
        window = loader.get_window(start)
        end = min(stop, window.stop)
        yield window.inputs, range(start - window.start, end - window.start)
        start = end


def split_positions(positions: range, *, one_by_one: bool) -> Iterator[tuple[np.int32, np.int32]]:
    """Yield the first position of each call, and the position after its last one."""
    stride = 1 if one_by_one else len(positions)
    for position in positions[::stride]:
        yield np.int32(position), np.int32(position + stride)


def run_windows(
    loader: Loader,
    start: int,
    stop: int,
    carry: LoopCarry,
    run_window: Callable[[LoopCarry, Inputs, range], LoopCarry],
) -> tuple[LoopCarry, np.ndarray]:
    """Run steps `start + 1 .. stop`, but no window after one in which the loop has ended early.

    Returns the carry, and the rows of telemetry of the windows that ran.
    """
    rows: list[np.ndarray] = []
    for inputs, positions in split_at_windows(loader, start, stop):
        carry = run_window(carry, inputs, positions)
        # Copied, since on the CPU the array is a view of memory that the next call overwrites.
        buffer = np.asarray(carry.telemetry_buffer)
        rows.append(buffer[positions.start : positions.stop].copy())
        if not carry.should_continue:
            break
    return carry, np.concatenate(rows)
