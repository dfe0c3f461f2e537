"""Checks of a custom step: its state, its results, and whether it calls the host."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from pipeline.core.files.value_text import join_first
from pipeline.core.host.jaxpr import find_source_line, iterate_equations
from pipeline.training.telemetry import PLACES

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
