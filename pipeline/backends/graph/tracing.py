"""Make the graph of a JAX function that was traced on shapes.

Calls are inlined. The body of a loop is in the graph once; the `repeat` of its nodes includes the
number of iterations. Of a `cond` the slowest branch is in the graph, of a platform-dependent `cond`
the default branch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.extend import core

from pipeline.backends.graph.graph import Graph, Marked, Node, UnboundedLoopError, Value, prune
from pipeline.core.host.jaxpr import (
    While,
    find_inner_jaxpr,
    find_source_call,
    interpret_jaxpr,
    is_library_call,
    join_scope,
    read_scan,
    read_while,
)

OPAQUE_CALLS = frozenset({"max_pool"})
"""Jitted functions that aren't inlined: a call is one node, with the function's name."""


@dataclass(frozen=True)
class _EquationContext:
    """The scope of an equation, and the calls and the loop around it: fields of its `Node`."""

    scope: str = ""
    calls: tuple[str, ...] = ()
    loop: int = 0
    repeat: int = 1
    call: Hashable = None
    in_library: bool = False
    """Whether the equation is in a function of a library, such as `jax.nn.silu`."""


def make_graph(traced: jax.stages.Traced) -> Graph:
    """Return the graph of a traced function. Raises UnboundedLoopError, see `add_while`."""
    closed = traced.jaxpr
    tracer = _Tracer()
    graph = tracer.graph
    graph.inputs = tuple(tracer.add_value(var) for var in closed.jaxpr.invars)
    graph.outputs = tracer.inline(closed, graph.inputs, _EquationContext())
    return prune(graph)


class _Tracer:
    """Inlines a jaxpr into a graph."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.loops = 0
        self._executions: dict[tuple[int, int], tuple[Any, int]] = {}
        """For each call in the user's code: frames of its first equation, number of executions."""

    def add_value(self, var: Any) -> int:
        """Add a value with a variable's shape and dtype; return its index."""
        self.graph.values.append(Value(tuple(var.aval.shape), str(var.aval.dtype)))
        return len(self.graph.values) - 1

    def add_constant(self, var: Any, _: Any = None) -> int:
        index = self.add_value(var)
        self.graph.constants.add(index)
        return index

    def inline(
        self, jaxpr: core.ClosedJaxpr, inputs: Sequence[int], context: _EquationContext
    ) -> tuple[int, ...]:
        return tuple(
            interpret_jaxpr(jaxpr, inputs, partial(self.add_equation, context), self.add_constant)
        )

    def add_equation(
        self, context: _EquationContext, eqn: Any, inputs: list[int]
    ) -> tuple[int, ...]:
        """Add an equation as a node, or inline the jaxpr that it calls; return the results."""
        name = eqn.primitive.name
        inner_context = replace(context, scope=join_scope(eqn, context.scope))
        control_flow = {"scan": self.add_scan, "while": self.add_while, "cond": self.add_cond}
        if name in control_flow:
            return control_flow[name](eqn, inputs, inner_context)
        if name == "optimization_barrier":
            self.graph.equations += 1
            return tuple(inputs)
        callee_name = eqn.params.get("name")
        callee = find_inner_jaxpr(eqn)
        if not inner_context.in_library:
            inner_context = replace(inner_context, call=self._find_call(eqn))
        if callee is None or (callee_name in OPAQUE_CALLS and _is_package_pooling(callee.jaxpr)):
            self.graph.equations += 1
            outputs = tuple(self.add_value(var) for var in eqn.outvars)
            primitive = name if callee is None else callee_name
            self._add_node(primitive, eqn.params, tuple(inputs), outputs, inner_context)
            return outputs
        if isinstance(callee_name, str) and not context.in_library:
            in_library = is_library_call(eqn)
            calls = (*context.calls, callee_name)
            inner_context = replace(inner_context, calls=calls, in_library=in_library)
        return self.inline(callee, inputs, inner_context)

    def _find_call(self, eqn: Any) -> tuple[tuple[int, int], int] | None:
        """Return the call in the user's code that made an equation, and its execution's number.

        A call that is executed several times, such as in a Python loop, has executions 1, 2, ...,
        each of which begins with the call's first equation. Gradients have number 0, since their
        execution isn't known.
        """
        frames = find_source_call(eqn)
        if not frames:
            return None
        call = frames[-1]
        first, count = self._executions.setdefault(call, (None, 0))
        is_gradient = "transpose(" in str(eqn.source_info.name_stack)
        if not is_gradient and first in (None, frames):
            count += 1
            self._executions[call] = (frames, count)
        return call, 0 if is_gradient else count

    def _add_node(
        self,
        primitive: str,
        params: Mapping[str, Any],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        context: _EquationContext,
    ) -> None:
        mark: Marked
        if "transpose(" in context.scope:
            mark = "backward"
        elif "jvp(" in context.scope:
            mark = "forward"
        else:
            mark = "unmarked"
        node = Node(
            primitive, params, inputs, outputs, context.scope, mark, context.calls, context.loop,
            context.repeat, context.call,
        )  # fmt: skip
        self.graph.nodes.append(node)

    def add_scan(self, eqn: Any, inputs: list[int], context: _EquationContext) -> tuple[int, ...]:
        """Add the body once, with views for the slices that an iteration reads and returns."""
        scan = read_scan(eqn)
        body = scan.body.jaxpr
        consts = scan.num_consts
        carries = scan.num_carry
        body_context = self._enter_loop(context, scan.length)
        first = consts + carries
        sliced = [
            self._add_view("scan_slice", index, var, body_context)
            for index, var in zip(inputs[first:], body.invars[first:], strict=True)
        ]
        carried = self._add_carries(body, consts, inputs[:first], body_context)
        outputs = self.inline(scan.body, [*inputs[:consts], *carried, *sliced], body_context)
        stacked = [
            self._add_view("scan_stack", index, var, body_context)
            for index, var in zip(outputs[carries:], eqn.outvars[carries:], strict=True)
        ]
        return (
            *self._add_final_carries(carried, outputs[:carries], eqn.outvars, context),
            *stacked,
        )

    def _enter_loop(self, context: _EquationContext, length: int) -> _EquationContext:
        self.loops += 1
        return replace(context, loop=self.loops, repeat=context.repeat * length)

    def _add_carries(
        self, body: Any, consts: int, inputs: list[int], body_context: _EquationContext
    ) -> list[int]:
        """Return the carried values in an iteration: new ones for those that the body changes."""
        variables = body.invars[consts : len(inputs)]
        carried = []
        for index, before, after in zip(inputs[consts:], variables, body.outvars, strict=False):
            if before is not after:
                index = self._add_view("scan_carry", index, before, body_context)
            carried.append(index)
        return carried

    def _add_final_carries(
        self,
        carried: Sequence[int],
        returned: Sequence[int],
        variables: Sequence[Any],
        context: _EquationContext,
    ) -> list[int]:
        """Record the pairs that a loop carries; return the values after its last iteration."""
        final = []
        for before, after, var in zip(carried, returned, variables, strict=False):
            if before == after:
                final.append(after)
            else:
                self.graph.carried.append((before, after))
                final.append(self._add_view("scan_carry", after, var, context))
        return final

    def _add_view(self, primitive: str, source: int, var: Any, context: _EquationContext) -> int:
        index = self.add_value(var)
        self._add_node(primitive, {}, (source,), (index,), context)
        return index

    def add_while(self, eqn: Any, inputs: list[int], context: _EquationContext) -> tuple[int, ...]:
        """Add a loop's body. Raises UnboundedLoopError unless the loop counts to a constant."""
        count = count_iterations(eqn)
        if count is None:
            raise UnboundedLoopError(
                f"while loop in {context.scope or 'the function'}: its number of iterations isn't "
                "constant; write it as jax.lax.scan or as jax.lax.fori_loop with constant bounds"
            )
        loop = read_while(eqn)
        body_context = self._enter_loop(context, count)
        _, consts, initial = loop.split_operands(inputs)
        carried = self._add_carries(loop.body.jaxpr, len(consts), [*consts, *initial], body_context)
        outputs = self.inline(loop.body, [*consts, *carried], body_context)
        return tuple(self._add_final_carries(carried, outputs, eqn.outvars, context))

    def add_cond(self, eqn: Any, inputs: list[int], context: _EquationContext) -> tuple[int, ...]:
        """Add the slowest branch, or the default branch of a platform-dependent `cond`."""
        branches = eqn.params["branches"]
        branch = branches[-1]
        if eqn.params.get("branches_platforms") is None:
            branch = max(branches, key=lambda branch: _estimate_work(branch.jaxpr))
        return self.inline(branch, inputs[1:], context)


def _is_package_pooling(jaxpr: Any) -> bool:
    """Return whether a `max_pool` is this package's, without products and window reductions."""
    heavy = ("dot_general", "conv_general_dilated", "reduce_window", "select_and_scatter")
    return not any(eqn.primitive.name.startswith(heavy) for eqn in jaxpr.eqns)


def _estimate_work(jaxpr: Any) -> int:
    """Return about how many elements a jaxpr writes and how many multiply-adds it does."""
    return sum(map(_estimate_equation_work, jaxpr.eqns))


def _estimate_equation_work(eqn: Any) -> int:
    called = find_inner_jaxpr(eqn)
    if called is not None:
        return _estimate_work(called.jaxpr)
    match eqn.primitive.name:
        case "scan":
            scan = read_scan(eqn)
            return scan.length * _estimate_work(scan.body.jaxpr)
        case "cond":
            return max(_estimate_work(branch.jaxpr) for branch in eqn.params["branches"])
        case "while":
            return (count_iterations(eqn) or 1) * _estimate_work(read_while(eqn).body.jaxpr)
    elements = sum(math.prod(var.aval.shape) for var in eqn.outvars)
    if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
        # The length of each sum is about the square root of the weight's size.
        elements *= math.isqrt(math.prod(eqn.invars[-1].aval.shape))
    return elements


def count_iterations(eqn: Any) -> int | None:
    """Return the iterations of a `while` that counts by one between literals, else None."""
    loop = read_while(eqn)
    condition = loop.condition.jaxpr
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
        return None
    counter, limit_atom = condition.eqns[0].invars
    condition_consts, _, start = loop.split_operands(eqn.invars)
    limit = _find_literal(limit_atom, condition.invars, condition_consts)
    if isinstance(counter, core.Literal) or limit is None:
        return None
    position = condition.invars.index(counter) - len(condition_consts)
    first = _find_literal(start[position], (), ())
    if first is None or not _counts_by_one(loop, position):
        return None
    return max(0, limit - first)


def _find_literal(atom: Any, variables: Sequence[Any], arguments: Sequence[Any]) -> int | None:
    """Return the whole number of a literal, or of a variable whose argument is one, else None."""
    if not isinstance(atom, core.Literal) and atom in variables[: len(arguments)]:
        atom = arguments[list(variables).index(atom)]
    return int(atom.val) if isinstance(atom, core.Literal) and atom.val % 1 == 0 else None


def _counts_by_one(loop: While, position: int) -> bool:
    body = loop.body.jaxpr
    before = body.invars[loop.num_body_consts + position]
    after = body.outvars[position]
    return any(
        eqn.primitive.name == "add"
        and after in eqn.outvars
        and before in eqn.invars
        and any(isinstance(atom, core.Literal) and atom.val == 1 for atom in eqn.invars)
        for eqn in body.eqns
    )
