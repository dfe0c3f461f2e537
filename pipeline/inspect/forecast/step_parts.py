"""Split of a step into parts that are timed one by one: library calls, and the work between them.

A step is first one list of equations, without calls and branches.

XLA computes products, convolutions and sorts by library calls, and fuses other work. So each call
is a part. Other equations form a part if they are connected and the same call needs them first. As
in a compiler, work is delayed until it is needed, such as the mask of a ReLU for its gradient.
Equal parts of several layers are timed once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from typing import Literal as Choice

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var

from pipeline.core.host.jaxpr import find_inner_jaxpr, interpret_jaxpr, read_scan
from pipeline.core.host.platforms import get_platform

Kind = Choice["product", "convolution", "call", "rest"]
PRODUCT_KINDS: Mapping[str, Kind] = {
    "dot_general": "product",
    "conv_general_dilated": "convolution",
    "ffi_call": "call",
}
"""Kinds of the primitives that are library calls; `call` is a call of oneDNN."""
APART = frozenset(
    {*PRODUCT_KINDS, "sort", "top_k", "cumsum", "cumprod", "cummax", "cumlogsumexp", "fft"}
    | {"reduce_window", "reduce_window_max", "reduce_window_sum"}
    | {"select_and_scatter_add", "select_and_gather_add", "scatter", "scatter-add", "scatter_add"}
    | {"cholesky", "triangular_solve", "eigh", "qr", "lu", "svd", "scan", "while"}
)
"""Primitives that XLA:CPU doesn't fuse with others."""
Atom = Any
"""A variable of a program, or a literal value: `Var | Literal`."""

PRODUCTS = ("dot_general", "conv_general_dilated")
"""Names of primitives that a CPU computes in float32 if their operands are bfloat16."""


@dataclass(frozen=True)
class StepPart:
    """A part of a step. Parts with equal `text`, the equations, take equal time."""

    kind: Kind
    text: str
    program: ClosedJaxpr = field(compare=False, repr=False)

    @cached_property
    def equations(self) -> Sequence[JaxprEqn]:
        return self.program.jaxpr.eqns


def parts_of(program: ClosedJaxpr, platform: str, times: int = 1) -> Counter[StepPart]:
    """Return the parts of a program for a platform, and how often each runs.

    The body of a scan counts once for each iteration. The body of a `while` counts once, since its
    number of iterations isn't known before it runs.
    """
    flat = flatten(program, platform)
    first_calls = _find_first_calls(flat)
    readers = _find_readers(flat, first_calls)
    parts: Counter[StepPart] = Counter()
    for numbers in _group_equations(flat, first_calls):
        first = flat.equations[numbers[0]]
        if first.primitive.name == "scan":
            length = times * int(first.params["length"])
            parts.update(parts_of(first.params["jaxpr"], platform, length))
        elif first.primitive.name == "while":
            parts.update(parts_of(first.params["body_jaxpr"], platform, times))
        else:
            parts[_make_part(flat, readers, numbers)] += times
    return parts


def _find_first_calls(flat: FlatProgram) -> list[int | None]:
    """Return, for each equation, the number of the first call that needs it.

    Calls are numbered from 0 in order, and a call needs itself. An equation that only results need
    has the number after the last call; an unused equation has None.
    """
    calls = [position for position, equation in enumerate(flat.equations) if _is_apart(equation)]
    number_of_call = {equation: number for number, equation in enumerate(calls)}
    first_needs: dict[Var, int] = {}

    def note_need(atoms: Iterable[object], number: int) -> None:
        for atom in atoms:
            if isinstance(atom, Var):
                first_needs[atom] = min(first_needs.get(atom, number), number)

    note_need(flat.results, len(calls))
    first_calls: list[int | None] = [None] * len(flat.equations)
    for n in reversed(range(len(flat.equations))):
        equation = flat.equations[n]
        numbers = [first_needs[v] for v in equation.outvars if v in first_needs]
        if numbers:
            first_call = number_of_call.get(n, min(numbers))
            first_calls[n] = first_call
            note_need(equation.invars, first_call)
    return first_calls


def _group_equations(flat: FlatProgram, first_calls: Sequence[int | None]) -> list[list[int]]:
    """Return groups of equation numbers.

    A library call is a group. Other equations form a group if arrays connect them, they are in one
    function, and the same call needs them first. Scalars, such as a learning rate, don't connect.
    """
    from scipy.cluster.hierarchy import DisjointSet

    connected = DisjointSet(range(len(flat.equations)))

    def get_place(n: int) -> tuple[int | None, int]:
        return first_calls[n], flat.functions[n]

    producers: dict[Var, int] = {}
    for n, equation in enumerate(flat.equations):
        if first_calls[n] is None or _is_apart(equation):
            continue
        for atom in equation.invars:
            producer = producers.get(atom) if isinstance(atom, Var) else None
            if producer is None or values_of(atom) <= 1:
                continue
            if get_place(producer) == get_place(n):
                connected.merge(producer, n)
        producers |= dict.fromkeys(equation.outvars, n)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for n in range(len(flat.equations)):
        if first_calls[n] is not None:
            groups[connected[n]].append(n)
    return list(groups.values())


def _is_apart(equation: JaxprEqn) -> bool:
    return equation.primitive.name in APART


def _find_readers(
    flat: FlatProgram, first_calls: Sequence[int | None]
) -> Mapping[Var, set[int | None]]:
    """Return the numbers of the equations that read each variable; None for the results."""
    readers: defaultdict[Var, set[int | None]] = defaultdict(set)
    for n, equation in enumerate(flat.equations):
        if first_calls[n] is not None:
            for atom in equation.invars:
                if isinstance(atom, Var):
                    readers[atom].add(n)
    for atom in flat.results:
        if isinstance(atom, Var):
            readers[atom].add(None)
    return readers


def _make_part(
    flat: FlatProgram, readers: Mapping[Var, set[int | None]], numbers: Sequence[int]
) -> StepPart:
    """Make a part of the equations `numbers`; its results are what other equations read."""
    inside: set[int | None] = set(numbers)
    equations = [flat.equations[n] for n in numbers]
    outputs = [v for equation in equations for v in equation.outvars]
    computed = set(outputs)
    inputs = dict.fromkeys(a for e in equations for a in e.invars if isinstance(a, Var))
    operands = [v for v in inputs if v not in computed]
    constants = [v for v in operands if v in flat.constants]
    jaxpr = Jaxpr(
        constants,
        [v for v in operands if v not in flat.constants],
        [v for v in outputs if readers.get(v, set()) - inside],
        equations,
        debug_info=DebugInfo("jit", "a part of a step", None, None),
    )
    kind = PRODUCT_KINDS.get(equations[0].primitive.name, "rest")
    return StepPart(kind, str(jaxpr), ClosedJaxpr(jaxpr, [flat.constants[v] for v in constants]))


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
