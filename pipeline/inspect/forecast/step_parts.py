"""Split of a step into parts that are timed one by one: library calls, and the work between them.

XLA computes products, convolutions and sorts by library calls, and fuses other work. So each call
is a part. Other equations form a part if they are connected and the same call needs them first. As
in a compiler, work is delayed until it is needed, such as the mask of a ReLU for its gradient.
Equal parts of several layers are timed once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal as Choice

from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Var

from pipeline.inspect.forecast.flat_program import FlatProgram, flatten, values_of

Kind = Choice["product", "convolution", "call", "rest"]
PRODUCTS: Mapping[str, Kind] = {
    "dot_general": "product",
    "conv_general_dilated": "convolution",
    "ffi_call": "call",
}
"""Kinds of the primitives that are library calls; `call` is a call of oneDNN."""
APART = frozenset(
    {*PRODUCTS, "sort", "top_k", "cumsum", "cumprod", "cummax", "cumlogsumexp", "fft"}
    | {"reduce_window", "reduce_window_max", "reduce_window_sum"}
    | {"select_and_scatter_add", "select_and_gather_add", "scatter", "scatter-add", "scatter_add"}
    | {"cholesky", "triangular_solve", "eigh", "qr", "lu", "svd", "scan", "while"}
)
"""Primitives that XLA:CPU doesn't fuse with others."""


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
    kind = PRODUCTS.get(equations[0].primitive.name, "rest")
    return StepPart(kind, str(jaxpr), ClosedJaxpr(jaxpr, [flat.constants[v] for v in constants]))
