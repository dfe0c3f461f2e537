"""Constants of a traced function, and the function with some constants as arguments.

A number of a recipe becomes constants of a program, such as Adam's `1 - b1`, which is computed in
float64 and rounded once. Functions that differ only in such numbers differ only in constants.
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
    compute_flow,
    find_called_jaxpr,
    interpret_jaxpr,
    run_traced,
)
from pipeline.models.imported.with_lowerings import CHECKPOINTS, CUSTOM_RULES


@dataclass(eq=False)
class TracedConstants:
    """The constants of a function in the order of its equations, and the equations without them."""

    values: list[np.ndarray] = field(default_factory=list)
    structure: list[Any] = field(default_factory=list)
    """Equations without constants: equal for functions that differ only in constants."""
    positions: dict[int, int] = field(default_factory=dict)
    """Position of a constant in `values`, by the identity of its literal or variable."""
    holders: list[set[int]] = field(default_factory=list)
    """Identities of the equations that contain each constant."""
    _enclosing: tuple[int, ...] = ()
    """Identities of the equations around the equation that is read."""
    _is_fixed: bool = False
    """Whether the constants of the equation that is read can't become arguments."""

    def read(self, jaxpr: ClosedJaxpr) -> None:
        """Add the equations of a jaxpr and of the jaxprs inside it."""
        operands = [("operand", number) for number in range(len(jaxpr.jaxpr.invars))]
        self.structure.append(("types", jaxpr.in_avals, jaxpr.out_avals))
        self.structure.append(
            interpret_jaxpr(jaxpr, operands, self._read_equation, self._read_constant)
        )

    def _read_equation(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Add an equation and the jaxprs inside it; return names of its results."""
        enclosing = self._enclosing
        is_fixed = self._is_fixed
        number = len(self.structure)
        params = equation.params
        is_call = find_called_jaxpr(equation) is not None
        self.structure.append((equation.primitive, operands))
        if equation.primitive.name in CUSTOM_RULES:
            # The rules for derivatives are left out: they are new objects in every trace.
            params = {"called": find_called_jaxpr(equation)}
        self._enclosing = (*enclosing, id(equation))
        # Constants can become arguments only in calls and control flow, except in checkpoints.
        can_vary = is_call or equation.primitive.name in FLOW
        self._is_fixed |= not can_vary or equation.primitive.name in CHECKPOINTS
        self.structure.append({name: self._to_comparable(value) for name, value in params.items()})
        self._enclosing = enclosing
        self._is_fixed = is_fixed
        return [(number, result) for result in range(len(equation.outvars))]

    def _to_comparable(self, param: Any) -> Any:
        """Return a parameter of an equation in a form that can be compared between traces."""
        if isinstance(param, Jaxpr | ClosedJaxpr):
            self.read(as_closed(param))
            return "jaxpr"
        if isinstance(param, tuple | list):
            return [self._to_comparable(item) for item in param]
        return read_bits(param) if isinstance(param, np.ndarray | Array) else param

    def _read_constant(self, atom: Any, value: Any) -> Any:
        """Add a constant; return its position in `values`, or its bits if it can't be an
        argument."""
        if jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.prng_key):
            with jax.ensure_compile_time_eval():
                return read_bits(jax.random.key_data(value))
        # A literal may be a number of Python; this rounds it as the program does.
        array = np.asarray(value, atom.aval.dtype)
        if self._is_fixed:
            return read_bits(array)
        position = self.positions.setdefault(id(atom), len(self.values))
        if position == len(self.values):
            self.values.append(array)
            self.holders.append(set())
        self.holders[position].update(self._enclosing)
        return ("constant", position, array.shape, array.dtype)


def read_bits(array: Any) -> tuple[Any, ...]:
    """Return shape, type and bytes of an array, to compare arrays bit for bit."""
    array = np.asarray(array)
    return array.shape, array.dtype, array.tobytes()


def read_constants(jaxpr: ClosedJaxpr) -> TracedConstants:
    """Return the constants of a traced function."""
    traced = TracedConstants()
    traced.read(jaxpr)
    return traced


def with_arguments(
    function: Callable[..., Any], positions: Sequence[Sequence[int]]
) -> Callable[..., Any]:
    """Return a function whose last arguments are values of constants.

    Each value replaces the constants at one group of positions, and has their shape and type.
    """
    numbers = {position: number for number, group in enumerate(positions) for position in group}

    def run(values: Sequence[Any], closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        traced = read_constants(closed)
        value_by_atom = {
            atom: values[numbers[position]]
            for atom, position in traced.positions.items()
            if position in numbers
        }
        holders = set[int]().union(*(traced.holders[position] for position in numbers))
        return _Evaluation(value_by_atom, holders).run(closed, operands)

    def call(*arguments_and_values: Any) -> Any:
        arguments = arguments_and_values[: -len(positions)]
        values = arguments_and_values[-len(positions) :]
        return run_traced(function, arguments, partial(run, values))

    return call


@dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs with other values of some constants."""

    values: Mapping[int, Array]
    """Values by the identity of a constant's literal or variable."""
    holders: Set[int]
    """Identities of the equations that contain these constants."""

    def run(self, jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        """Return the results of a jaxpr for its operands."""
        return interpret_jaxpr(jaxpr, operands, self._compute_equation, self._read_constant)

    def _read_constant(self, atom: Any, constant: Any) -> Any:
        return self.values.get(id(atom), constant)

    def _compute_equation(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        with equation.ctx.manager:
            called = find_called_jaxpr(equation)
            if id(equation) not in self.holders:
                return bind_equation(equation, operands)
            if called is not None:
                return self.run(called, operands)
            return compute_flow(equation, operands, self.run)
