"""Networks that end in probabilities, which losses of classes read as logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from pipeline.core.host.jaxpr import find_called_jaxpr, interpret_jaxpr

PASSED_ON = {"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose"}
"""Primitives that change no value, except by rounding."""


def find_probabilities(jaxpr: ClosedJaxpr) -> str | None:
    """Return "softmax" or "sigmoid" if a jaxpr's first result is computed by it, else None. Classes
    are the last axis; a softmax over another axis returns None."""
    match result := _trace(jaxpr, [_Result("", ()) for _ in jaxpr.jaxpr.invars])[0]:
        case _Result("logistic"):
            return "sigmoid"
        case _Result("div", (_Result("exp") as exp, _Result("reduce_sum", (summed,)) as total)):
            is_softmax = total.params["axes"] == result.axes[-1:] and _are_equal(exp, summed)
            return "softmax" if is_softmax else None
        case _Result(
            "concatenate",
            (_Result("logistic") as one, _Result("sub", (whole, other)))
            | (_Result("sub", (whole, other)), _Result("logistic") as one),
        ) if not isinstance(whole, _Result) and (result.params["dimension"],) == result.axes[-1:]:
            return "sigmoid" if np.all(np.asarray(whole) == 1) and _are_equal(one, other) else None
    return None


@dataclass(frozen=True, eq=False)
class _Result:
    """A result of a primitive, or with the name "" an input."""

    name: str
    operands: tuple[Any, ...]
    params: Any = None
    axes: tuple[int | None, ...] = ()
    """The axis of the primitive's result that each axis was before it was passed on, or None."""


def _trace(jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Return how a jaxpr's results are computed, each a _Result or a constant."""
    return interpret_jaxpr(jaxpr, operands, _trace_equation, lambda _, constant: constant)


def _trace_equation(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    name = equation.primitive.name
    if name in PASSED_ON:
        has_axes = getattr(operands[0], "axes", ())
        return [_move_axes(operands[0], equation) if has_axes else operands[0]]
    if (called := find_called_jaxpr(equation)) is not None:
        return _trace(called, operands)
    axes = [tuple(range(getattr(var.aval, "ndim", 0))) for var in equation.outvars]
    return [_Result(name, tuple(operands), equation.params, kept_axes) for kept_axes in axes]


def _move_axes(result: _Result, equation: Any) -> _Result:
    """Return a result with the axes that a primitive of `PASSED_ON` moves."""
    if "permutation" in equation.params:
        return replace(result, axes=tuple(result.axes[n] for n in equation.params["permutation"]))
    shapes = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    # A reshaped axis is the same if its size and its stride are.
    before, after = ([(n, prod(shape[i + 1 :])) for i, n in enumerate(shape)] for shape in shapes)
    origins = dict(zip(before, result.axes, strict=True))
    return replace(result, axes=tuple(map(origins.get, after)))


def _are_equal(first: Any, second: Any, depth: int = 3) -> bool:
    """Return whether values are the same, or computed alike by at most `depth` primitives."""
    if first is second or depth == 0 or not (isinstance(first, _Result) and first.name):
        return first is second
    is_alike = isinstance(second, _Result) and first.name == second.name
    pairs = zip(first.operands, second.operands, strict=False) if is_alike else ()
    is_alike = is_alike and str(first.params) == str(second.params)
    return is_alike and all(_are_equal(a, b, depth - 1) for a, b in pairs)
