"""A traced function as one list of equations, without the calls and branches around them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from pipeline.core.host.jaxpr import per_device_jaxpr, read_scan, walk

Atom = Any
"""A variable of a program, or a literal value: `Var | Literal`."""

IDENTITIES = ("sharding_constraint",)
"""Equations that return their operand."""


@dataclass(frozen=True)
class FlatProgram:
    """Equations in their order, each variable assigned once; `results` are what they are for.

    `functions` has for each equation the number of the function that it stays in, or 0: the
    compiler fuses nothing across the call of a function that is marked not to be inlined.
    `constants` are the variables whose values are known, such as tables of a resize.
    """

    equations: tuple[JaxprEqn, ...]
    functions: tuple[int, ...]
    results: tuple[Atom, ...]
    constants: Mapping[Var, Any]


def flatten(program: ClosedJaxpr, platform: str) -> FlatProgram:
    """Return the equations of a program for a platform, such as "cpu" or "cuda".

    Calls are replaced by what they call. Of several branches, the one that computes the most values
    is taken, or the platform's if the platform decides.
    """
    flattening = _Flattening(platform)
    inputs = [Var(v.aval) for v in program.jaxpr.invars]
    results = flattening.add(program, inputs)
    return FlatProgram(
        tuple(flattening.equations),
        tuple(flattening.functions),
        tuple(results),
        flattening.constants,
    )


class _Flattening:
    def __init__(self, platform: str) -> None:
        self._platform = platform
        self._branches: dict[Var, int] = {}
        """Numbers of the branches that the platform decides."""
        self._function = 0
        self._last_function = 0
        self.equations: list[JaxprEqn] = []
        self.functions: list[int] = []
        self.constants: dict[Var, Any] = {}

    def add(self, program: ClosedJaxpr, inputs: list[Atom]) -> list[Atom]:
        """Append a program's equations on these inputs, and return its results."""
        return walk(program, inputs, self._add_equation, self._add_constant)

    def _add_constant(self, atom: Atom, value: Any) -> Atom:
        if isinstance(atom, Literal):
            return atom
        constant = Var(atom.aval)
        self.constants[constant] = value
        return constant

    def _add_equation(self, equation: JaxprEqn, inputs: list[Atom]) -> list[Atom]:
        name = equation.primitive.name
        called = per_device_jaxpr(equation)
        if name in IDENTITIES:
            return inputs
        if name == "cond":
            return self.add(self._branch(equation, inputs[0]), inputs[1:])
        if called is not None:
            with self._own_function(equation):
                return self.add(called, inputs)
        results: list[Atom] = [Var(v.aval) for v in equation.outvars]
        if name == "platform_index":
            listed = equation.params["platforms"]
            fits = (n for n, names in enumerate(listed) if not names or self._platform in names)
            self._branches[results[0]] = next(fits, len(listed))
        self.equations.append(equation.replace(invars=inputs, outvars=results))
        self.functions.append(self._function)
        return results

    @contextmanager
    def _own_function(self, call: JaxprEqn) -> Iterator[None]:
        """While a call is added that is not to be inlined, count its equations as a function."""
        if (call.ctx.xla_metadata or {}).get("inlineable") != "false":
            yield
            return
        outer = self._function
        self._last_function = self._last_function + 1
        self._function = self._last_function
        yield
        self._function = outer

    def _branch(self, equation: JaxprEqn, number: Atom) -> ClosedJaxpr:
        branches: tuple[ClosedJaxpr, ...] = equation.params["branches"]
        if number in self._branches:
            return branches[self._branches[number]]
        return max(branches, key=lambda branch: _values(branch.jaxpr))


def _values(jaxpr: Jaxpr) -> int:
    """Return the number of values that the equations of a function compute."""
    total = 0
    for equation in jaxpr.eqns:
        is_scan = equation.primitive.name == "scan"
        called = read_scan(equation).body if is_scan else per_device_jaxpr(equation)
        total += _values(called.jaxpr) if called is not None else values_of(*equation.outvars)
    return total


def values_of(*atoms: Atom) -> int:
    """Return the number of values of arrays."""
    return sum(math.prod(atom.aval.shape) for atom in atoms)


def bytes_of(*atoms: Atom) -> int:
    """Return the bytes of arrays; a key of random numbers has the bytes of its words."""
    return sum(math.prod(a.aval.shape) * a.aval.dtype.itemsize for a in atoms)


def is_key(dtype: Any) -> bool:
    """Whether values of a type are keys of random numbers."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))
