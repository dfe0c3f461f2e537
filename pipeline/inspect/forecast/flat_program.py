"""A traced function as one list of equations, without calls and branches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from pipeline.core.host.jaxpr import find_inner_jaxpr, interpret_jaxpr, read_scan
from pipeline.core.host.platforms import get_platform

Atom = Any
"""A variable of a program, or a literal value: `Var | Literal`."""

PRODUCTS = ("dot_general", "conv_general_dilated")
"""Names of primitives that a CPU computes in float32 if their operands are bfloat16."""


def flatten(program: ClosedJaxpr, platform: str) -> FlatProgram:
    """Return the equations of a program for a platform, such as "cpu" or "cuda".

    On a CPU, products of bfloat16 are products of float32 between conversions, as XLA compiles them
    (its pass float-normalization). So a conversion belongs to the work that it is fused with.

    Calls are replaced by the called functions. Of several branches, the branch that computes the
    most values is used, or the platform's branch if the platform decides.
    """
    flat = FlatProgram(platform)
    flat.results = flat.add(program, [Var(v.aval) for v in program.jaxpr.invars])
    return flat


@dataclass
class FlatProgram:
    """Equations in order, each variable assigned once, with the `results` of the program.

    Functions that are marked not to be inlined are numbered from 1; the compiler doesn't fuse
    across their calls.
    """

    platform: str
    equations: list[JaxprEqn] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    """Number of each equation's function, or 0 outside of them."""
    results: list[Atom] = field(default_factory=list)
    constants: dict[Var, Any] = field(default_factory=dict)
    """Variables with constant values, such as tables of a resize."""
    _branches: dict[Var, int] = field(default_factory=dict)
    """Numbers of the platform's branches, by the variable that chooses the branch."""
    _float32: dict[Atom, Atom] = field(default_factory=dict)
    """The float32 conversion of each bfloat16 variable."""
    _function_number: int = 0
    _last_function: int = 0

    def add(self, program: ClosedJaxpr, inputs: list[Atom]) -> list[Atom]:
        """Append a program's equations on these inputs, and return its results."""
        return interpret_jaxpr(program, inputs, self._add_equation, self._add_constant)

    def _add_constant(self, atom: Atom, value: Any) -> Atom:
        if isinstance(atom, Literal):
            return atom
        constant = Var(atom.aval)
        self.constants[constant] = value
        return constant

    def _add_equation(self, equation: JaxprEqn, inputs: list[Atom]) -> list[Atom]:
        name = equation.primitive.name
        called = find_inner_jaxpr(equation)
        if name == "sharding_constraint":  # returns its operand
            return inputs
        if name == "cond":
            branches = equation.params["branches"]
            branch = max(branches, key=lambda branch: _count_values(branch.jaxpr))
            if inputs[0] in self._branches:
                branch = branches[self._branches[inputs[0]]]
            return self.add(branch, inputs[1:])
        if called is not None:
            outer_number = self._function_number
            # Equations of a call that must not be inlined have a function's number.
            if (equation.ctx.xla_metadata or {}).get("inlineable") == "false":
                self._last_function += 1
                self._function_number = self._last_function
            outputs = self.add(called, inputs)
            self._function_number = outer_number
            return outputs
        widens = name in PRODUCTS and get_platform(self.platform).widens_bfloat16_products
        if widens and any(atom.aval.dtype == jnp.bfloat16 for atom in inputs):
            return self._add_float32_product(equation, inputs)
        results: list[Atom] = [Var(v.aval) for v in equation.outvars]
        if name == "platform_index":
            platforms = equation.params["platforms"]
            matches = (
                n for n, names in enumerate(platforms) if not names or self.platform in names
            )
            self._branches[results[0]] = next(matches, len(platforms))
        self.equations.append(equation.replace(invars=inputs, outvars=results))
        self.functions.append(self._function_number)
        return results

    def _add_float32_product(self, equation: JaxprEqn, inputs: list[Atom]) -> list[Atom]:
        """Append a product in float32. Products that read a variable share its conversion."""
        output: Any = equation.outvars[0].aval

        def convert(value: Array) -> Array:
            return value.astype(jnp.float32)

        def multiply(*operands: Array) -> Array:
            options = {**equation.params, "preferred_element_type": np.dtype(jnp.float32)}
            return equation.primitive.bind(*operands, **options).astype(output.dtype)

        operands: list[Atom] = []
        for atom in inputs:
            if isinstance(atom, Literal):  # can't be a key
                operands += self.add(jax.make_jaxpr(convert)(atom.aval), [atom])
                continue
            if atom not in self._float32:
                (self._float32[atom],) = self.add(jax.make_jaxpr(convert)(atom.aval), [atom])
            operands.append(self._float32[atom])
        return self.add(jax.make_jaxpr(multiply)(*(atom.aval for atom in operands)), operands)


def _count_values(jaxpr: Jaxpr) -> int:
    """Return the number of values that the equations of a function compute."""
    total = 0
    for equation in jaxpr.eqns:
        is_scan = equation.primitive.name == "scan"
        called = read_scan(equation).body if is_scan else find_inner_jaxpr(equation)
        total += _count_values(called.jaxpr) if called is not None else values_of(*equation.outvars)
    return total


def values_of(*atoms: Atom) -> int:
    """Return the number of elements of arrays."""
    return sum(math.prod(atom.aval.shape) for atom in atoms)


def bytes_of(*atoms: Atom) -> int:
    """Return the bytes of arrays; a random key has the bytes of its words."""
    return sum(math.prod(atom.aval.shape) * atom.aval.dtype.itemsize for atom in atoms)
