"""Trace a JAX function to its graph, from shapes alone: no weight is allocated.

Calls are inlined. A scan's body appears once, its nodes repeated by the scan's length. A `cond` is
its slowest branch; a platform-dependent one, the branch for any platform.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.extend import core

from pipeline.backends.graph.graph import Graph, Marked, Node, UnboundedLoopError, Value, prune
from pipeline.core.host.jaxpr import (
    While,
    per_device_jaxpr,
    read_scan,
    read_while,
    scope_of,
    walk,
)

OPAQUE_CALLS = frozenset({"max_pool"})
"""Jitted functions that are one node under their name, forward and backward."""


@dataclass(frozen=True)
class _Place:
    """Position of the walk: scope, mark, loop and repeats."""

    scope: str = ""
    calls: tuple[str, ...] = ()
    loop: int = 0
    repeat: int = 1


def trace_graph(function: Callable[..., Any], *arguments: Any) -> Graph:
    """Return the graph of `function(*arguments)`; arguments may be `jax.ShapeDtypeStruct`s.

    Raises UnboundedLoopError for a while loop without a trip count.
    """
    return trace_with_result(function, arguments)[0]


def trace_with_result(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Graph, Any]:
    """Return the graph, and the shapes of the function's result as `jax.eval_shape` has them."""
    traced = jax.jit(lambda operands: function(*operands)).trace(arguments)
    closed = traced.jaxpr
    tracer = _Tracer()
    graph = tracer.graph
    graph.inputs = tuple(tracer.fresh(var) for var in closed.jaxpr.invars)
    graph.outputs = tracer.open(closed, graph.inputs, _Place())
    return prune(graph), traced.out_info


class _Tracer:
    """Inlines a jaxpr into a graph."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.loops = 0

    def fresh(self, var: Any) -> int:
        """Add a value of the shape of a variable."""
        self.graph.values.append(Value(tuple(var.aval.shape), str(var.aval.dtype)))
        return len(self.graph.values) - 1

    def constant(self, var: Any, _: Any = None) -> int:
        """Add a value that is known when the graph is compiled."""
        index = self.fresh(var)
        self.graph.constants.add(index)
        return index

    def open(
        self, jaxpr: core.ClosedJaxpr, inputs: Sequence[int], place: _Place
    ) -> tuple[int, ...]:
        """Inline a jaxpr and return its outputs."""
        return tuple(walk(jaxpr, inputs, partial(self.equation, place), self.constant))

    def equation(self, place: _Place, eqn: Any, inputs: list[int]) -> tuple[int, ...]:
        """Add one equation: inlined if it holds a jaxpr, else as a node."""
        name = eqn.primitive.name
        inside = replace(place, scope=scope_of(eqn, place.scope))
        flow = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}
        if name in flow:
            return flow[name](eqn, inputs, inside)
        if name == "optimization_barrier":
            self.graph.equations += 1
            return tuple(inputs)
        called = eqn.params.get("name")
        inner = per_device_jaxpr(eqn)
        if inner is not None and not (called in OPAQUE_CALLS and _only_moves(inner.jaxpr)):
            calls = (*place.calls, called) if isinstance(called, str) else place.calls
            return self.open(inner, inputs, replace(inside, calls=calls))
        self.graph.equations += 1
        outputs = tuple(self.fresh(var) for var in eqn.outvars)
        self._add(name if inner is None else called, eqn.params, tuple(inputs), outputs, inside)
        return outputs

    def _add(
        self,
        primitive: str,
        params: Mapping[str, Any],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        place: _Place,
    ) -> None:
        forward: Marked = "forward" if "jvp(" in place.scope else "unmarked"
        mark: Marked = "backward" if "transpose(" in place.scope else forward
        node = Node(
            primitive, params, inputs, outputs, place.scope, mark, place.calls, place.loop,
            place.repeat,
        )  # fmt: skip
        self.graph.nodes.append(node)

    def scan(self, eqn: Any, inputs: list[int], place: _Place) -> tuple[int, ...]:
        """Add the body once, repeated; scanned inputs are sliced, stacked outputs are written."""
        scan = read_scan(eqn)
        body = scan.body.jaxpr
        consts = scan.num_consts
        carries = scan.num_carry
        inside = self._enter_loop(place, scan.length)
        first = consts + carries
        sliced = [
            self._view("scan_slice", index, var, inside)
            for index, var in zip(inputs[first:], body.invars[first:], strict=True)
        ]
        carried = self._carries(body, consts, inputs[:first], inside)
        outputs = self.open(scan.body, [*inputs[:consts], *carried, *sliced], inside)
        stacked = [
            self._view("scan_stack", index, var, inside)
            for index, var in zip(outputs[carries:], eqn.outvars[carries:], strict=True)
        ]
        return (*self._final_carries(carried, outputs[:carries], eqn.outvars, place), *stacked)

    def _enter_loop(self, place: _Place, length: int) -> _Place:
        self.loops += 1
        return replace(place, loop=self.loops, repeat=place.repeat * length)

    def _carries(self, body: Any, consts: int, inputs: list[int], inside: _Place) -> list[int]:
        """Add the carry at an iteration's start, unless the body returns it unchanged."""
        variables = body.invars[consts : len(inputs)]
        return [
            index if before is after else self._view("scan_carry", index, before, inside)
            for index, before, after in zip(inputs[consts:], variables, body.outvars, strict=False)
        ]

    def _final_carries(
        self,
        carried: Sequence[int],
        returned: Sequence[int],
        variables: Sequence[Any],
        place: _Place,
    ) -> list[int]:
        """Add the final values of a loop's carry."""
        self.graph.carried += [
            (before, after)
            for before, after in zip(carried, returned, strict=True)
            if before != after
        ]
        return [
            after if before == after else self._view("scan_carry", after, var, place)
            for before, after, var in zip(carried, returned, variables, strict=False)
        ]

    def _view(self, primitive: str, source: int, var: Any, place: _Place) -> int:
        index = self.fresh(var)
        self._add(primitive, {}, (source,), (index,), place)
        return index

    def while_loop(self, eqn: Any, inputs: list[int], place: _Place) -> tuple[int, ...]:
        """Add a loop that counts to a constant, repeated by its count. Refuse any other."""
        count = trip_count(eqn)
        if count is None:
            raise UnboundedLoopError(
                f"while loop in {place.scope or 'the function'}: its number of trips can't be read "
                "off; write it as jax.lax.scan or as jax.lax.fori_loop with constant bounds"
            )
        loop = read_while(eqn)
        inside = self._enter_loop(place, count)
        _, consts, initial = loop.split_operands(inputs)
        body = loop.body.jaxpr
        carried = self._carries(body, len(consts), [*consts, *initial], inside)
        outputs = self.open(loop.body, [*consts, *carried], inside)
        return tuple(self._final_carries(carried, outputs, eqn.outvars, place))

    def cond(self, eqn: Any, inputs: list[int], place: _Place) -> tuple[int, ...]:
        """Add one of the branches: that for any platform, or else the slowest."""
        branches = eqn.params["branches"]
        branch = branches[-1]
        if eqn.params.get("branches_platforms") is None:
            branch = max(branches, key=lambda branch: _weight(branch.jaxpr))
        return self.open(branch, inputs[1:], place)


def _only_moves(jaxpr: Any) -> bool:
    """Whether a jaxpr holds slices and comparisons alone, as this package's pooling does."""
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    heavy = ("dot_general", "conv_general_dilated", "reduce_window", "select_and_scatter")
    return not any(name.startswith(heavy) for name in names)


def _weight(jaxpr: Any) -> int:
    """Return the elements that a jaxpr writes, matrix products by their multiply-adds.

    An estimate that is good enough to compare branches.
    """
    return sum(map(_weight_of, jaxpr.eqns))


def _weight_of(eqn: Any) -> int:
    called = per_device_jaxpr(eqn)
    if called is not None:
        return _weight(called.jaxpr)
    match eqn.primitive.name:
        case "scan":
            scan = read_scan(eqn)
            return scan.length * _weight(scan.body.jaxpr)
        case "cond":
            return max(_weight(branch.jaxpr) for branch in eqn.params["branches"])
        case "while":
            return (trip_count(eqn) or 1) * _weight(read_while(eqn).body.jaxpr)
    elements = sum(math.prod(var.aval.shape) for var in eqn.outvars)
    if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
        elements *= math.isqrt(math.prod(eqn.invars[-1].aval.shape))
    return elements


def trip_count(eqn: Any) -> int | None:
    """Return the trip count of a `while` equation that counts by one up to a literal, else None."""
    loop = read_while(eqn)
    cond = loop.condition.jaxpr
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt":
        return None
    counter, limit = cond.eqns[0].invars
    condition_consts, _, start = loop.split_operands(eqn.invars)
    limit = _literal(limit, cond.invars, condition_consts)
    if isinstance(counter, core.Literal) or limit is None:
        return None
    position = cond.invars.index(counter) - len(condition_consts)
    first = _literal(start[position], (), ())
    if first is None or not _counts_by_one(loop, position):
        return None
    return max(0, limit - first)


def _literal(atom: Any, variables: Sequence[Any], arguments: Sequence[Any]) -> int | None:
    if not isinstance(atom, core.Literal) and atom in variables[: len(arguments)]:
        atom = arguments[list(variables).index(atom)]
    return int(atom.val) if isinstance(atom, core.Literal) else None


def _counts_by_one(loop: While, position: int) -> bool:
    body = loop.body.jaxpr
    before = body.invars[loop.num_body_consts + position]
    after = body.outvars[position]
    return any(
        inner.primitive.name == "add"
        and after in inner.outvars
        and before in inner.invars
        and any(isinstance(atom, core.Literal) and atom.val == 1 for atom in inner.invars)
        for inner in body.eqns
    )
