"""The autopsy of a custom step: its first value that isn't finite, and the line that made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from pipeline.backends.graph.replay.interpreter import Interpreter, ReplayValue
from pipeline.backends.graph.replay.origins import NamedTensor, Origin, find_cause
from pipeline.backends.graph.replay.ranges import (
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
"""A description has at most this many operands."""
MAX_EXAMPLES = 8
"""A description has at most this many examples of a batch."""


def examine_step(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> str:
    """Describe the first value that isn't finite in the computation of a step's loss.

    The step is computed again from the state before it, one operation at a time. The compiled step
    may round differently.
    """
    closed, results = jax.make_jaxpr(step, return_shape=True)(state, batch)
    inputs = [*_name_leaves("state", state), *_name_leaves("batch", batch)]
    is_loss = [path == f"1/{LOSS}" for path in list_leaf_paths(results)]
    loss_jaxpr = dce_jaxpr(closed.jaxpr, is_loss, instantiate=True)[0]
    # The cache would keep hundreds of programs of one operation each, which no later run needs.
    with disable_compile_cache():
        (loss,) = Interpreter().run(core.ClosedJaxpr(loss_jaxpr, closed.consts), inputs)
    if loss.origin is None:
        return "one operation at a time the loss is finite"
    return _describe_origin(find_cause(loss.origin).origin, _find_batch_size(batch))


def _name_leaves(kind: str, tree: Any) -> list[ReplayValue]:
    """Return the leaves of an argument by path, with an origin for those that aren't finite."""
    values = []
    for path, leaf in zip(list_leaf_paths(tree), jax.tree.leaves(tree), strict=True):
        array = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        named = NamedTensor(kind, path)
        origin = None
        if is_float(array) and not np.isfinite(find_largest_magnitude(array)):
            array_range = find_range(array)
            has_nan = array_range.nan > 0
            origin = Origin(-1, "", "", has_nan, result=array_range, array=array, named=named)
        values.append(ReplayValue(array, named, origin=origin))
    return values


def _find_batch_size(batch: Any) -> int:
    """Return the number of examples if all arrays of a batch have the same, else 0."""
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    return lengths.pop()[0] if len(lengths) == 1 and () not in lengths else 0


def _describe_origin(origin: Origin, batch_size: int) -> str:
    """Return a line on the first cause: the operation, its place, its result and its operands."""
    assert origin.result is not None, "a cause has a recorded result"
    examples = _list_examples(origin, batch_size)
    if origin.named is not None:
        name = f"{origin.named.kind} {origin.named.name}".strip()
        return f"the step reads {name}: {origin.result}{examples}"
    layer = find_layer(origin.scope)
    place = ", ".join(filter(None, (layer, origin.line)))
    operation = f"{origin.primitive} ({place})" if place else origin.primitive
    listed = origin.operands[:MAX_OPERANDS]
    operands = [f"{operand.source}: {operand.range}" for operand in listed]
    read = f"; it read {'; '.join(operands)}" if operands else ""
    return f"{operation} returned {origin.result}{examples}{read}"


def _list_examples(origin: Origin, batch_size: int) -> str:
    """Return the examples whose part of the result isn't finite; "" if these are all or unknown."""
    rows = find_non_finite(origin.array, batch_size) if batch_size > 1 else None
    if not rows or len(rows) == batch_size:
        return ""
    listed = join_first(list(map(str, rows)), MAX_EXAMPLES)
    return f" in {len(rows)} of {batch_size} examples: {listed}"
