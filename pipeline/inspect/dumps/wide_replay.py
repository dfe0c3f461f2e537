"""Replay of a traced function in float64: the same equations with wider floating-point types.

Its results show how much of a difference is rounding. Types that layers request are widened too.
Random draws keep their bits, since they are integers until they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from pipeline.core.host.jaxpr import (
    FLOW,
    bind_equation,
    compute_flow,
    find_called_jaxpr,
    interpret_jaxpr,
    run_traced,
)
from pipeline.core.host.platforms import CPU

QUICK = {"xla_backend_optimization_level": "0"}
"""Compiler options of a CPU program that runs once: optimization takes longer than it saves."""
_WIDE = jnp.dtype("float64")
_BIT_PRIMITIVES = ("bitcast_convert_type", "nextafter")
"""Primitives that aren't widened, since their results depend on the bits of a number."""


def compile_in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes `function` in float64 on the CPU, compiled."""
    return lambda *arguments: run_traced(function, arguments, _run_compiled)


def _run_compiled(jaxpr: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Compute the outputs of a jaxpr by `_run_wide`, compiled for the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices(CPU.name)[0]):
        program = jax.jit(lambda arrays: _run_wide(jaxpr, arrays), compiler_options=QUICK)
        results: list[Any] = program(operands)
    return results


def _run_wide(jaxpr: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Compute the outputs of a jaxpr, with all floating-point numbers in float64."""

    def read(atom: Any, constant: Any) -> Any:
        is_literal = isinstance(atom, core.Literal)
        return _widen_value(np.asarray(constant, atom.aval.dtype) if is_literal else constant)

    def compute(eqn: Any, operands: list[Any]) -> list[Any]:
        return list(map(_widen_value, _compute_equation(eqn, operands)))

    return interpret_jaxpr(jaxpr, list(map(_widen_value, operands)), compute, read)


def _compute_equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    params = eqn.params
    called = find_called_jaxpr(eqn)
    if called is not None:
        return _run_wide(called, operands)
    if name in FLOW:
        return compute_flow(eqn, operands, _run_wide)
    if name == "convert_element_type":
        return [operands[0].astype(_widen_type(params["new_dtype"]))]
    if name == "reduce_precision":
        return operands
    if name in _BIT_PRIMITIVES:
        pairs = zip(operands, eqn.invars, strict=True)
        operands = [value.astype(atom.aval.dtype) for value, atom in pairs]
    else:
        preferred = params.get("preferred_element_type")
        if preferred is not None:
            params = {**params, "preferred_element_type": _widen_type(preferred)}
    return bind_equation(eqn.replace(params=params), operands)


def _widen_value(value: Any) -> Any:
    """Return a value, in float64 if it is a floating-point number."""
    return value.astype(_WIDE) if jnp.issubdtype(value.dtype, jnp.floating) else value


def _widen_type(dtype: Any) -> Any:
    return _WIDE if jnp.issubdtype(dtype, jnp.floating) else dtype
