"""The autopsy of a custom step: its first value that isn't finite, and the line that made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from pipeline.backends.graph.replay import (
    Interpreter,
    NamedTensor,
    Origin,
    ReplayValue,
    find_cause,
    find_largest_magnitude,
    find_non_finite,
    find_range,
    is_float,
)
from pipeline.core.files.value_text import join_first
from pipeline.core.host.jax_private import disable_compile_cache
from pipeline.core.host.tree_paths import list_leaf_paths
from pipeline.engine.step_checks import LOSS
from pipeline.models.modules.name_stack import find_layer

MAX_OPERANDS = 3
"""Largest number of operands in a description."""
MAX_EXAMPLES = 8
"""Largest number of examples of a batch in a description."""


def examine_step(
    step: Callable[[Any, Any], Any], state: Any, batch: Any, data_rows: np.ndarray | None = None
) -> str:
    """Return a text about the first value that isn't finite in the computation of a step's loss.

    `data_rows`, int (batch,), has the row of each example in the data; None: unknown.
    The step is computed again from the state before it, one operation at a time, so its values may
    be rounded differently.
    """
    closed, results = jax.make_jaxpr(step, return_shape=True)(state, batch)
    inputs = [
        make_input(NamedTensor(kind, path), leaf)
        for kind, tree in (("state", state), ("batch", batch))
        for path, leaf in zip(list_leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    ]
    is_loss = [path == f"1/{LOSS}" for path in list_leaf_paths(results)]
    loss_jaxpr = dce_jaxpr(closed.jaxpr, is_loss, instantiate=True)[0]
    # Without the cache, which would store hundreds of programs of one operation each.
    with disable_compile_cache():
        (loss,) = Interpreter().evaluate(core.ClosedJaxpr(loss_jaxpr, closed.consts), inputs)
    if loss.origin is None:
        return "one operation at a time the loss is finite"
    return _describe_origin(find_cause(loss.origin).origin, _find_batch_size(batch), data_rows)


def make_input(named: NamedTensor, leaf: Any) -> ReplayValue:
    """Return an input of a step with its name, and with an origin if it isn't finite."""
    array = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    if not is_float(array) or np.isfinite(find_largest_magnitude(array)):
        return ReplayValue(array, named)
    stats = find_range(array)
    origin = Origin(-1, "", "", stats.nan > 0, result=stats, array=array, named=named)
    return ReplayValue(array, named, origin=origin)


def _find_batch_size(batch: Any) -> int:
    """Return the length of the first axis if all arrays of a batch have it, else 0."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
    lengths = {shape[0] if shape else 0 for shape in shapes}
    return lengths.pop() if len(lengths) == 1 else 0


def _describe_origin(origin: Origin, batch_size: int, data_rows: np.ndarray | None) -> str:
    """Return a text about a cause: the operation, its place, its result and its operands."""
    assert origin.result is not None, "a cause has a recorded result"
    examples = _list_examples(origin, batch_size, data_rows)
    if origin.named is not None:
        name = f"{origin.named.kind} {origin.named.name}".strip()
        return f"the step reads {name}: {origin.result}{examples}"
    place = ", ".join(filter(None, (find_layer(origin.scope), origin.line)))
    operation = f"{origin.primitive} ({place})" if place else origin.primitive
    operands = [f"{item.source}: {item.range}" for item in origin.operands[:MAX_OPERANDS]]
    operands_text = f"; it read {'; '.join(operands)}" if operands else ""
    return f"{operation} returned {origin.result}{examples}{operands_text}"


def _list_examples(origin: Origin, batch_size: int, data_rows: np.ndarray | None) -> str:
    """Return a text about examples with non-finite results; "" if these are all or unknown."""
    rows = find_non_finite(origin.array, batch_size) if batch_size > 1 else None
    if not rows or len(rows) == batch_size:
        return ""
    listed = join_first(list(map(str, rows)), MAX_EXAMPLES)
    text = f" in {len(rows)} of {batch_size} examples: {listed}"
    if data_rows is None:
        return text
    noun = "row" if len(rows) == 1 else "rows"
    numbers = [str(data_rows[row]) for row in rows]
    return f"{text} ({noun} {join_first(numbers, MAX_EXAMPLES)} of the data)"
