"""Networks that end in probabilities, which losses of classes read as logits."""

from __future__ import annotations

from collections.abc import Mapping

from jax.extend.core import Jaxpr, JaxprEqn, Var

from pipeline.core.host.jaxpr import find_called_jaxpr

PASSED_ON = frozenset(
    ("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy")
)
"""Primitives that change no value, except by rounding."""


def find_probabilities(jaxpr: Jaxpr) -> str | None:
    """Return "softmax" or "sigmoid" if a jaxpr's first result is computed by it, else None."""
    source = _Sources(jaxpr).find(jaxpr.outvars[0])
    if source is None:
        return None
    sources, equation = source
    name = equation.primitive.name
    if name == "logistic":
        return "sigmoid"
    operands = [sources.find(operand) for operand in equation.invars]
    names = [None if found is None else found[1].primitive.name for found in operands]
    if name == "div" and names == ["exp", "reduce_sum"]:
        return "softmax"
    if name == "concatenate" and "logistic" in names and "sub" in names:
        return "sigmoid"
    return None


class _Sources:
    """The equations that compute the variables of a jaxpr, inside of calls too."""

    def __init__(self, jaxpr: Jaxpr, outer: Mapping[Var, tuple[_Sources, object]] | None = None):
        self._equations = {
            variable: equation for equation in jaxpr.eqns for variable in equation.outvars
        }
        self._outer = outer or {}

    def find(self, variable: object) -> tuple[_Sources, JaxprEqn] | None:
        """Return the equation that computes a variable, before those that pass values on."""
        if not isinstance(variable, Var):
            return None
        if variable in self._outer:
            sources, operand = self._outer[variable]
            return sources.find(operand)
        equation = self._equations.get(variable)
        if equation is None:
            return None
        if equation.primitive.name in PASSED_ON:
            return self.find(equation.invars[0])
        called = find_called_jaxpr(equation)
        if called is None:
            return self, equation
        inner = called.jaxpr
        operands = equation.invars[len(equation.invars) - len(inner.invars) :]
        outer = {
            name: (self, operand) for name, operand in zip(inner.invars, operands, strict=True)
        }
        return _Sources(inner, outer).find(inner.outvars[equation.outvars.index(variable)])
