"""Networks that end in probabilities, which losses of classes read as logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from pipeline.core.host.jaxpr import find_called_jaxpr

PASSED_ON = frozenset(
    ("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy")
)
"""Primitives that change no value, except by rounding."""


def find_probabilities(jaxpr: Jaxpr) -> str | None:
    """Return "softmax" or "sigmoid" if a jaxpr's first result is computed by it, else None."""
    result = _Scope(jaxpr, {}, ()).trace(jaxpr.outvars[0])
    operands = result.list_operands()
    names = [operand.name for operand in operands]
    if result.name == "logistic":
        return "sigmoid"
    if result.name == "div" and names == ["exp", "reduce_sum"]:
        return "softmax" if operands[1].list_operands()[0].equals(operands[0]) else None
    if result.name == "concatenate" and sorted(names) == ["logistic", "sub"]:
        probability, other = sorted(operands, key=lambda operand: operand.name)
        one, subtracted = other.list_operands()
        is_one = isinstance(one.atom, Literal) and one.atom.val == 1
        return "sigmoid" if is_one and subtracted.equals(probability) else None
    return None


class _Scope:
    """The equations of a jaxpr, inside of the calls `calls`, with its inputs in outer scopes."""

    def __init__(self, jaxpr: Jaxpr, outer: Mapping[object, _Value], calls: tuple[int, ...]):
        self.outer, self.calls = outer, calls
        self.equations = {
            variable: equation for equation in jaxpr.eqns for variable in equation.outvars
        }

    def trace(self, atom: Any) -> _Value:
        """Return the value of an atom, before the equations that pass it on and inside of calls."""
        if isinstance(atom, Literal):
            return _Value(self, atom, None)
        if atom in self.outer:
            return self.outer[atom].scope.trace(self.outer[atom].atom)
        equation = self.equations.get(atom)
        if equation is not None and equation.primitive.name in PASSED_ON:
            return self.trace(equation.invars[0])
        called = None if equation is None else find_called_jaxpr(equation)
        if equation is None or called is None:
            return _Value(self, atom, equation)
        inner = called.jaxpr
        operands = equation.invars[len(equation.invars) - len(inner.invars) :]
        values = [_Value(self, operand, None) for operand in operands]
        outer = dict(zip(inner.invars, values, strict=True))
        scope = _Scope(inner, outer, (*self.calls, id(equation)))
        return scope.trace(inner.outvars[equation.outvars.index(atom)])


@dataclass(frozen=True)
class _Value:
    """An atom of a scope, and the equation that computes it, if any."""

    scope: _Scope
    atom: object
    equation: JaxprEqn | None

    @property
    def name(self) -> str:
        return "" if self.equation is None else self.equation.primitive.name

    def list_operands(self) -> list[_Value]:
        return [] if self.equation is None else list(map(self.scope.trace, self.equation.invars))

    def equals(self, other: _Value, depth: int = 3) -> bool:
        """Return whether `other` is this value, or computed alike by at most `depth` equations."""
        if self.atom is other.atom and self.scope.calls == other.scope.calls:
            return True
        first, second = self.equation, other.equation
        if depth == 0 or first is None or second is None or first.primitive is not second.primitive:
            return False
        pairs = zip(self.list_operands(), other.list_operands(), strict=False)
        return first.params == second.params and all(a.equals(b, depth - 1) for a, b in pairs)
