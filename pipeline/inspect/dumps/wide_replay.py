"""A traced function in float64: the same equations, every floating-point type widened.

It tells how much of a difference is rounding. Types that layers ask for are widened too, while
random draws keep their bits: they are integers until they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from pipeline.models.modules.control_flow import FLOW, called_jaxpr, compute_flow

QUICK = {"xla_backend_optimization_level": "0"}
"""Options of a program for the CPU that runs once: optimising it takes longer than that saves."""
_WIDE = jnp.dtype("float64")
_OF_BITS = ("bitcast_convert_type", "nextafter")
"""Primitives that depend on how a number is stored, computed in their own type."""


def widened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes `function` in float64 on the CPU, compiled.

    Takes arrays of any types; results that are floating-point numbers are float64.
    """

    def compute(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            program = jax.jit(
                lambda *given: _run(closed.jaxpr, closed.consts, given), compiler_options=QUICK
            )
            results = program(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return compute


def _run(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Compute the outputs of a jaxpr, with all floating-point numbers in float64."""
    env: dict[Any, Any] = {
        var: _wide(value) for var, value in zip(jaxpr.constvars, consts, strict=True)
    }
    env |= {var: _wide(value) for var, value in zip(jaxpr.invars, inputs, strict=True)}

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return _wide(np.asarray(atom.val, _dtype_of(atom)))
        return env[atom]

    for eqn in jaxpr.eqns:
        outputs = _equation(eqn, [read(atom) for atom in eqn.invars])
        env |= dict(zip(eqn.outvars, map(_wide, outputs), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    called = called_jaxpr(eqn)
    if called is not None:
        return _run_closed(called, operands)
    if name in FLOW:
        return compute_flow(eqn, operands, _run_closed)
    if name == "convert_element_type":
        return [operands[0].astype(_wide_type(params["new_dtype"]))]
    if name == "reduce_precision":
        return operands
    if name in _OF_BITS:
        own = zip(operands, eqn.invars, strict=True)
        operands = [value.astype(_dtype_of(atom)) for value, atom in own]
    else:
        preferred = params.get("preferred_element_type")
        if preferred is not None:
            params = {**params, "preferred_element_type": _wide_type(preferred)}
    result = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return result if eqn.primitive.multiple_results else [result]


def _run_closed(jaxpr: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    return _run(jaxpr.jaxpr, jaxpr.consts, operands)


def _dtype_of(atom: Any) -> Any:
    return atom.aval.dtype


def _wide(value: Any) -> Any:
    """The value in float64 where it is a floating-point number."""
    return value.astype(_WIDE) if jnp.issubdtype(value.dtype, jnp.floating) else value


def _wide_type(dtype: Any) -> Any:
    return _WIDE if jnp.issubdtype(dtype, jnp.floating) else dtype
