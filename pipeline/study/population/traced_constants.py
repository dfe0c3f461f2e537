"""The constants of a traced function, and the function with some of them as arguments.

A number of a recipe reaches a program as constants: `1 - b1` of Adam is computed in doubles by the
part that needs it, and rounded once. Functions that differ in such numbers alone have the same
equations, whose constants differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from pipeline.core.host.jaxpr import (
    FLOW,
    as_closed,
    bind_equation,
    called_jaxpr,
    compute_flow,
    run_traced,
    walk,
)
from pipeline.models.imported.with_lowerings import CHECKPOINTS, RULED


@dataclass(eq=False)
class TracedConstants:
    """The constants of a function in the order of its equations, and what is left without them."""

    values: list[np.ndarray] = field(default_factory=list)
    structure: list[Any] = field(default_factory=list)
    """The equations, equal for functions that differ in the values of constants alone."""
    positions: dict[int, int] = field(default_factory=dict)
    """Of a constant among the values, by the identity of its literal or variable."""
    holders: list[set[int]] = field(default_factory=list)
    """The identities of the equations that each constant is inside of."""
    _around: tuple[int, ...] = ()
    _is_fixed: bool = False

    def read(self, jaxpr: ClosedJaxpr) -> None:
        """Add the equations of a jaxpr, and of those inside."""
        operands = [("operand", number) for number in range(len(jaxpr.jaxpr.invars))]
        self.structure.append(("types", jaxpr.in_avals, jaxpr.out_avals))
        self.structure.append(walk(jaxpr, operands, self._read_equation, self._read_constant))

    def _read_equation(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        before = self._around, self._is_fixed
        number = len(self.structure)
        params = equation.params
        is_call = called_jaxpr(equation) is not None
        self.structure.append((equation.primitive, operands))
        if equation.primitive.name in RULED:
            # Of derivatives, which have been taken: new objects in every trace.
            params = {"called": called_jaxpr(equation)}
        self._around = (*self._around, id(equation))
        # Others can't be computed again with an argument inside.
        self._is_fixed |= equation.primitive.name in CHECKPOINTS
        self._is_fixed |= not (is_call or equation.primitive.name in FLOW)
        self.structure.append({name: self._describe(value) for name, value in params.items()})
        self._around, self._is_fixed = before
        return [(number, result) for result in range(len(equation.outvars))]

    def _describe(self, param: Any) -> Any:
        """Return a parameter of an equation, comparable with another trace's."""
        if isinstance(param, Jaxpr | ClosedJaxpr):
            self.read(as_closed(param))
            return "jaxpr"
        if isinstance(param, tuple | list):
            return [self._describe(item) for item in param]
        return bits_of(param) if isinstance(param, np.ndarray | Array) else param

    def _read_constant(self, atom: Any, value: Any) -> Any:
        if jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.prng_key):
            with jax.ensure_compile_time_eval():
                return bits_of(jax.random.key_data(value))
        # Rounded as the program rounds it: a literal may be a number of Python.
        array = np.asarray(value, atom.aval.dtype)
        if self._is_fixed:
            return bits_of(array)
        position = self.positions.setdefault(id(atom), len(self.values))
        if position == len(self.values):
            self.values.append(array)
            self.holders.append(set())
        self.holders[position].update(self._around)
        return ("constant", position, array.shape, array.dtype)


def bits_of(array: Any) -> tuple[Any, ...]:
    """Shape, type and bytes of an array, to be compared."""
    array = np.asarray(array)
    return array.shape, array.dtype, array.tobytes()


def trace_constants(function: Callable[..., Any], *arguments: Any) -> TracedConstants:
    """The constants of a function of arrays, from their shapes."""
    traced = TracedConstants()
    traced.read(jax.make_jaxpr(function)(*arguments))
    return traced


def with_arguments(
    function: Callable[..., Any], positions: Sequence[Sequence[int]]
) -> Callable[..., Any]:
    """Return a function that takes values of constants as well, after its arguments.

    Each stands in place of the constants at some positions, and has their shape and type.
    """

    numbers = {place: n for n, places in enumerate(positions) for place in places}

    def run(values: Sequence[Any], closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        traced = TracedConstants()
        traced.read(closed)
        by_atom = {atom: values[numbers[p]] for atom, p in traced.positions.items() if p in numbers}
        holders = set[int]().union(*(traced.holders[place] for place in numbers))
        return _Evaluation(by_atom, holders).run(closed, operands)

    def call(*arguments_and_values: Any) -> Any:
        arguments = arguments_and_values[: -len(positions)]
        values = arguments_and_values[-len(positions) :]
        return run_traced(function, arguments, partial(run, values))

    return call


@dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs with values in place of constants, by the identities of these."""

    values: Mapping[int, Array]
    holders: Set[int]
    """Identities of the equations that the constants are inside of."""

    def run(self, jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        """Results of a jaxpr for its operands."""
        return walk(jaxpr, operands, self._compute, self._read_constant)

    def _read_constant(self, atom: Any, constant: Any) -> Any:
        return self.values.get(id(atom), constant)

    def _compute(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        with equation.ctx.manager:
            called = called_jaxpr(equation)
            if id(equation) not in self.holders:
                return bind_equation(equation, operands)
            if called is not None:
                return self.run(called, operands)
            return compute_flow(equation, operands, self.run)
