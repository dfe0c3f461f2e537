"""Networks that end in probabilities, which losses of classes read as logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from pipeline.core.host.jaxpr import find_called_jaxpr, interpret_jaxpr

PASSED_ON = frozenset(
    ("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy")
)
"""Primitives that change no value, except by rounding."""


def find_probabilities(jaxpr: ClosedJaxpr) -> str | None:
    """Return "softmax" or "sigmoid" if a jaxpr's first result is computed by it, else None."""
    match _trace(jaxpr, [_Result("", ()) for _ in jaxpr.jaxpr.invars])[0]:
        case _Result("logistic"):
            return "sigmoid"
        case _Result("div", (_Result("exp") as exp, _Result("reduce_sum", (summed,)))):
            return "softmax" if _are_equal(exp, summed) else None
        case _Result(
            "concatenate",
            (_Result("logistic") as one, _Result("sub", (whole, other)))
            | (_Result("sub", (whole, other)), _Result("logistic") as one),
        ) if not isinstance(whole, _Result):
            return "sigmoid" if np.all(np.asarray(whole) == 1) and _are_equal(one, other) else None
    return None


@dataclass(frozen=True, eq=False)
class _Result:
    """A result of a primitive, or with the name "" an input."""

    name: str
    operands: tuple[Any, ...]
    params: Any = None


def _trace(jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Return how a jaxpr's results are computed, each a _Result or a constant."""
    return interpret_jaxpr(jaxpr, operands, _trace_equation, lambda _, constant: constant)


def _trace_equation(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    name = equation.primitive.name
    if name in PASSED_ON:
        return operands[:1]
    if (called := find_called_jaxpr(equation)) is not None:
        return _trace(called, operands)
    return [_Result(name, tuple(operands), equation.params) for _ in equation.outvars]


def _are_equal(first: Any, second: Any, depth: int = 3) -> bool:
    """Return whether values are the same, or computed alike by at most `depth` primitives."""
    if first is second or depth == 0 or not (isinstance(first, _Result) and first.name):
        return first is second
    is_alike = isinstance(second, _Result) and first.name == second.name
    pairs = zip(first.operands, second.operands, strict=False) if is_alike else ()
    is_alike = is_alike and str(first.params) == str(second.params)
    return is_alike and all(_are_equal(a, b, depth - 1) for a, b in pairs)
