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
from pipeline.backends.graph.replay.ranges import find_non_finite, find_range, is_float, largest
from pipeline.core.files.compile_cache import no_compile_cache
from pipeline.engine.step_checks import LOSS
from pipeline.models.modules.name_stack import find_layer

MAX_OPERANDS = 3
"""Operands that are described."""
MAX_EXAMPLES = 8
"""Examples of a batch that are listed."""


def examine_step(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> str:
    """Describe the first value that isn't finite in the computation of a step's loss.

    The step is computed again from the state before it, one operation at a time. Rounding may
    differ from that of the compiled step.
    """
    closed, results = jax.make_jaxpr(step, return_shape=True)(state, batch)
    inputs = [*_name_leaves("state", state), *_name_leaves("batch", batch)]
    is_loss = [_path(path) == f"1/{LOSS}" for path, _ in jax.tree.leaves_with_path(results)]
    of_loss = dce_jaxpr(closed.jaxpr, is_loss, instantiate=True)[0]
    # Hundreds of programs of one operation each, which no later run needs.
    with no_compile_cache():
        (loss,) = Interpreter().run(core.ClosedJaxpr(of_loss, closed.consts), inputs)
    if loss.origin is None:
        return "one operation at a time the loss is finite"
    return _describe(find_cause(loss.origin).origin, _batch_size(batch))


def _name_leaves(kind: str, tree: Any) -> list[ReplayValue]:
    """Return the leaves of an argument by path, with an origin for those that aren't finite."""
    values = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        named = NamedTensor(kind, _path(path))
        origin = None
        if is_float(array) and not np.isfinite(largest(array)):
            size = find_range(array)
            origin = Origin(-1, "", "", size.nan > 0, result=size, array=array, named=named)
        values.append(ReplayValue(array, named, origin=origin))
    return values


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _batch_size(batch: Any) -> int:
    """Return the number of examples if all arrays of a batch agree, else 0."""
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    return lengths.pop()[0] if len(lengths) == 1 and () not in lengths else 0


def _describe(origin: Origin, batch_size: int) -> str:
    """Describe the first cause in one line: the operation, its place, its result, its operands."""
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
    """List the examples of the batch whose part of a result isn't finite, if it has such parts."""
    rows = find_non_finite(origin.array, batch_size) if batch_size > 1 else None
    if not rows or len(rows) == batch_size:
        return ""
    listed = ", ".join(map(str, rows[:MAX_EXAMPLES]))
    more = f" and {len(rows) - MAX_EXAMPLES} more" if len(rows) > MAX_EXAMPLES else ""
    return f" in {len(rows)} of {batch_size} examples: {listed}{more}"
