"""A traced function in float64: the same equations, every floating-point type widened.

It shows how much of a difference is rounding. Types that layers request are widened too, but random
draws have the same bits: they are integers until they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from pipeline.core.host.jaxpr import FLOW, called_jaxpr, compute_flow, walk
from pipeline.core.host.platforms import CPU

QUICK = {"xla_backend_optimization_level": "0"}
"""Options of a program for the CPU that runs once: optimising it takes longer than that saves."""
_WIDE = jnp.dtype("float64")
_OF_BITS = ("bitcast_convert_type", "nextafter")
"""Primitives that depend on how a number is stored, so they are not widened."""


def widen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes `function` in float64 on the CPU, compiled.

    Takes arrays of any types; results that are floating-point numbers are float64.
    """

    def compute(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        with jax.enable_x64(True), jax.default_device(jax.devices(CPU.name)[0]):
            program = jax.jit(lambda operands: _run(closed, operands), compiler_options=QUICK)
            results = program(leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return compute


def _run(jaxpr: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Compute the outputs of a jaxpr, with all floating-point numbers in float64."""

    def read(atom: Any, constant: Any) -> Any:
        is_literal = isinstance(atom, core.Literal)
        return _wide(np.asarray(constant, atom.aval.dtype) if is_literal else constant)

    def compute(eqn: Any, operands: list[Any]) -> list[Any]:
        return list(map(_wide, _compute(eqn, operands)))

    return walk(jaxpr, list(map(_wide, operands)), compute, read)


def _compute(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    params = eqn.params
    called = called_jaxpr(eqn)
    if called is not None:
        return _run(called, operands)
    if name in FLOW:
        return compute_flow(eqn, operands, _run)
    if name == "convert_element_type":
        return [operands[0].astype(_wide_type(params["new_dtype"]))]
    if name == "reduce_precision":
        return operands
    if name in _OF_BITS:
        pairs = zip(operands, eqn.invars, strict=True)
        operands = [value.astype(atom.aval.dtype) for value, atom in pairs]
    else:
        preferred = params.get("preferred_element_type")
        if preferred is not None:
            params = {**params, "preferred_element_type": _wide_type(preferred)}
    result = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return result if eqn.primitive.multiple_results else [result]


def _wide(value: Any) -> Any:
    """The value in float64 if it is a floating-point number."""
    return value.astype(_WIDE) if jnp.issubdtype(value.dtype, jnp.floating) else value


def _wide_type(dtype: Any) -> Any:
    return _WIDE if jnp.issubdtype(dtype, jnp.floating) else dtype
