"""Checks of a custom step: its state, its results, whether it calls the host, and its first value
that isn't finite with the line that made it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from pipeline.core.host.jax_private import keep_from_cache
from pipeline.core.host.jaxpr import find_source_line, iterate_equations
from pipeline.core.host.tree_paths import list_leaf_paths
from pipeline.models.modules.name_stack import find_layer
from pipeline.training.telemetry import PLACES

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
    with keep_from_cache():
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


LOSS = "loss"
"""Name of the metric that must be finite, if a step returns it."""
CALLBACKS = ("debug_callback", "debug_print", "io_callback", "pure_callback")
"""Primitives that call the host."""
PACKED_TYPES = (
    *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
    *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
)
"""Types of less than a byte. Jax gives their arrays another layout than XLA gives a loop's."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Address of an object in a text; it differs between processes."""


@dataclass(frozen=True)
class StepSignature:
    """A checked step: the names of its metrics, and a digest of its computation."""

    metrics: tuple[str, ...]
    digest: str


def check_state(state: Any) -> None:
    """Raise ValueError unless all leaves of a state are readable arrays or numbers."""
    leaves = jax.tree.leaves_with_path(state)
    if not leaves:
        raise ValueError(f"state: has no arrays: {state!r}")
    for path, leaf in leaves:
        name = f"state{jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.Array):
            if leaf.is_deleted():
                raise ValueError(
                    f"{name}: its memory was donated to another function, and is gone; pass the "
                    "state that this function returned, or don't donate the argument"
                )
        elif not isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
            raise ValueError(
                f"{name}: is a {type(leaf).__name__}; must be an array: keep other values outside "
                "of the state, as equinox.partition(model, equinox.is_array) does"
            )
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            _require_type(name, leaf.dtype)


def check_saved_state(state: Any) -> None:
    """Raise ValueError for a leaf that a checkpoint can't hold, which is one of size 0."""
    for path, leaf in jax.tree.leaves_with_path(state):
        if np.size(leaf) == 0:
            name = f"state{jax.tree_util.keystr(path)}"
            problem = f"has the shape {np.shape(leaf)}, and a checkpoint can't hold 0 values"
            raise ValueError(f"{name}: {problem}; leave it out of the state, or save=None")


def _require_type(name: str, dtype: Any) -> None:
    """Raise ValueError for a type that a compiled loop can't carry."""
    if dtype.name in PACKED_TYPES:
        problem = "which the compiled loop can't carry; hold its values as int8 or float8_e4m3fn"
        raise ValueError(f"{name}: has the type {dtype.name}, {problem}")
    if isinstance(dtype, np.dtype) and (dtype.kind in "OSUMm" or dtype.names is not None):
        raise ValueError(f"{name}: has the type {dtype}; must be of numbers or truth values")


def trace_step(step: Callable[..., Any], state: Any, batch: Any) -> StepSignature:
    """Trace a step on shapes and check its results.

    Raises ValueError if it calls the host, or doesn't return a state like its argument and a
    dictionary of scalars. Errors of the step itself are raised unchanged.
    """
    closed, results = jax.make_jaxpr(step, return_shape=True)(state, batch)
    if not isinstance(results, tuple):
        raise ValueError(f"step: returns a {type(results).__name__}; must return (state, metrics)")
    if len(results) != 2:
        raise ValueError(f"step: returns a tuple of {len(results)}; must return (state, metrics)")
    _check_returned_state(state, results[0])
    metrics = _check_metrics(results[1])
    for equation, _ in iterate_equations(closed.jaxpr):
        if equation.primitive.name in CALLBACKS:
            line = find_source_line(equation)
            place = f", {line}" if line else ""
            raise ValueError(
                f"step: calls the host ({equation.primitive.name}{place}); a sink runs without it, "
                "and would call it again after a resume: return the value as a metric instead"
            )
    return StepSignature(metrics, _hash_jaxpr(closed))


def describe(leaf: Any) -> str:
    """Return the dtype and the shape of an array as text."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def narrow_dtype(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array in the dtype that jax has for its own, such as int32 for int64. Raises
    ValueError, beginning with the name, for a whole number that this dtype can't hold."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and array.dtype != dtype and array.size:
        bounds = np.iinfo(dtype)
        for value in (array.min(), array.max()):
            if not bounds.min <= value <= bounds.max:
                limits = f"must be {bounds.min} to {bounds.max}"
                raise ValueError(f"{name}: has {value}, and jax has {dtype}; {limits}")
    return array.astype(dtype, copy=False)


def _check_returned_state(state: Any, returned: Any) -> None:
    """Raise ValueError unless a step's states have the same structure, shapes and dtypes."""
    before = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
    after = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(returned)}
    problems = [f"state{path} is missing" for path in before if path not in after]
    problems += [f"state{path} is new" for path in after if path not in before]
    problems += [
        f"state{path} is {describe(after[path])}, was {describe(leaf)}"
        for path, leaf in before.items()
        if path in after and describe(after[path]) != describe(leaf)
    ]
    old_structure: Any = jax.tree.structure(state)
    new_structure: Any = jax.tree.structure(returned)
    if not problems and old_structure != new_structure:
        problems = [f"its structure is {new_structure}, was {old_structure}"]
    if problems:
        first_problems = join_first(problems, 3, "; ", "; and ")
        raise ValueError(
            f"step: returns another state than its argument: {first_problems}; "
            "structure, shapes and dtypes must be the same"
        )


def _check_metrics(metrics: Any) -> tuple[str, ...]:
    """Return the names of a step's metrics. Raises ValueError unless all are real scalars."""
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"step: returns a {type(metrics).__name__} as metrics; must be a dictionary of "
            'scalars, such as {"loss": loss}'
        )
    for name, value in metrics.items():
        if not isinstance(name, str) or not name or name in PLACES:
            raise ValueError(
                f"step: a metric is named {name!r}; must be text other than {', '.join(PLACES)}"
            )
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise ValueError(f"step: metric {name!r} is a {type(value).__name__}; must be a scalar")
        kind = "key" if is_key(value.dtype) else np.dtype(value.dtype).kind
        if value.shape != () or kind not in "fiubV":  # V: bfloat16 and other types of ml_dtypes.
            raise ValueError(
                f"step: metric {name!r} is {describe(value)}; must be a real scalar, such as a mean"
            )
    if not metrics:
        raise ValueError('step: returns no metrics; must return some, such as {"loss": loss}')
    return tuple(metrics)


def is_key(dtype: Any) -> bool:
    """Whether a type is a type of random keys."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def _hash_jaxpr(closed: core.ClosedJaxpr) -> str:
    """Return the SHA-256 of a jaxpr's text and its constants."""
    digest = hashlib.sha256(ADDRESS.sub("", str(closed)).encode())
    for constant in closed.consts:
        is_random_key = isinstance(constant, jax.Array) and is_key(constant.dtype)
        data = jax.random.key_data(constant) if is_random_key else constant
        digest.update(np.asarray(data).tobytes())
    return digest.hexdigest()
