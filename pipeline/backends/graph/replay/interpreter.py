"""Interpreter that runs a jaxpr equation by equation and inspects every result.

Calls are inlined, loops iterate and branches are taken by their values. So every equation that runs
belongs to the user's network, the loss or the map ops, with the scope that it was traced in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from pipeline.backends.graph.replay.origins import COLUMN, MOVES, NamedTensor, Origin
from pipeline.backends.graph.replay.ranges import is_float, largest, range_of
from pipeline.backends.graph.replay.values import (
    ReplayValue,
    as_constant,
    at_iteration,
    is_below,
    is_finite,
    operands_of,
    stack_iterations,
)
from pipeline.core.host.jaxpr import (
    called_jaxpr,
    read_scan,
    read_while,
    scope_of,
    source_line,
    walk,
)
from pipeline.models.modules.name_stack import layer_of

BITS = "bitcast_convert_type"

Names = Mapping[Any, NamedTensor]


@dataclass(frozen=True)
class Extreme:
    """The finite value that came closest to the largest number of its type."""

    share: float = 0.0
    """The magnitude divided by the largest number of the type."""
    value: float = 0.0
    dtype: str = ""
    source: str = ""


@dataclass
class Interpreter:
    """Runs jaxprs and records the inputs of layers and the most extreme value."""

    layer_inputs: dict[str, list[ReplayValue]] = field(default_factory=dict)
    """Outputs of other layers that each layer read in the forward pass."""
    extreme: Extreme = field(default_factory=Extreme)
    names: Names = field(default_factory=dict)
    """Names of the variables of the jaxprs that it runs."""
    _equations: int = 0
    _iterations: list[int] = field(default_factory=list)

    def run(
        self, jaxpr: core.ClosedJaxpr, inputs: Sequence[ReplayValue], scope: str = ""
    ) -> list[ReplayValue]:
        """Compute the outputs of a jaxpr for its inputs."""
        return walk(jaxpr, inputs, partial(self._compute_named, scope), _read_constant)

    def _compute_named(
        self, outer: str, eqn: Any, operands: list[ReplayValue]
    ) -> list[ReplayValue]:
        outputs = self._equation(eqn, operands, scope_of(eqn, outer))
        return [
            replace(output, named=self.names[var]) if var in self.names else output
            for var, output in zip(eqn.outvars, outputs, strict=True)
        ]

    def _equation(self, eqn: Any, operands: list[ReplayValue], scope: str) -> list[ReplayValue]:
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, operands, scope)
        if name == "while":
            return self._while(eqn, operands, scope)
        if name == "cond":
            branches, index = eqn.params["branches"], int(operands[0].array)
            chosen = branches[min(max(index, 0), len(branches) - 1)]
            return self.run(chosen, operands[1:], scope)
        called = called_jaxpr(eqn)
        if called is not None:
            return self.run(called, operands, scope)
        return self._compute(eqn, operands, scope)

    def _scan(self, eqn: Any, operands: list[ReplayValue], scope: str) -> list[ReplayValue]:
        scan = read_scan(eqn)
        body, carried = scan.body, scan.num_carry
        consts, carry, scanned = scan.split_operands(operands)
        iterations = range(scan.length)
        results: dict[int, list[ReplayValue]] = {}
        for iteration in reversed(iterations) if scan.reverse else iterations:
            sliced = [at_iteration(value, iteration) for value in scanned]
            with self._in_iteration(iteration):
                outputs = self.run(body, [*consts, *carry, *sliced], scope)
            carry, results[iteration] = outputs[:carried], outputs[carried:]
        stacked = [
            stack_iterations([results[iteration][at] for iteration in iterations], var)
            for at, var in enumerate(body.jaxpr.outvars[carried:])
        ]
        return [*carry, *stacked]

    @contextmanager
    def _in_iteration(self, iteration: int) -> Iterator[None]:
        self._iterations.append(iteration)
        yield
        self._iterations.pop()

    def _while(self, eqn: Any, operands: list[ReplayValue], scope: str) -> list[ReplayValue]:
        loop = read_while(eqn)
        condition, body = loop.condition, loop.body
        of_condition, of_body, carry = loop.split_operands(operands)
        while True:
            (should_continue,) = self.run(condition, [*of_condition, *carry], scope)
            if not bool(should_continue.array):
                return carry
            carry = self.run(body, [*of_body, *carry], scope)

    def _compute(self, eqn: Any, operands: list[ReplayValue], scope: str) -> list[ReplayValue]:
        params = eqn.primitive.get_bind_params(eqn.params)
        with eqn.ctx.manager:
            result = eqn.primitive.bind(*(operand.array for operand in operands), **params)
        arrays = result if eqn.primitive.multiple_results else [result]
        self._equations += 1
        layer, name = layer_named(scope), eqn.primitive.name
        if "jvp(" in scope and "transpose(" not in scope:
            self._note_inputs(layer, operands)
        constant = all(operand.constant for operand in operands)
        return [
            ReplayValue(array, None, layer, name, constant, self._look(eqn, scope, operands, array))
            for array in arrays
        ]

    def _note_inputs(self, layer: str, operands: list[ReplayValue]) -> None:
        known = self.layer_inputs.setdefault(layer, [])
        for operand in operands:
            inner = operand.constant or operand.layer == layer
            named = operand.named is not None and operand.named.kind != COLUMN
            is_new = all(operand.array is not value.array for value in known)
            if is_new and not (inner or named) and is_float(operand.array):
                known.append(operand)

    def _look(self, eqn: Any, scope: str, operands: list[ReplayValue], array: Any) -> Origin | None:
        """The origin of a result that is not finite; None for a finite one."""
        primitive = eqn.primitive.name
        if not is_float(array):
            return self._look_at_bits(primitive, scope, operands, array)
        size = largest(array)
        if np.isfinite(size):
            self._note_extreme(size, array, primitive, scope, operands)
            return None
        infinite = [value for value in operands if value.constant and not is_finite(value)]
        meant = bool(infinite) and primitive in MOVES and is_below(array)
        causes = [value.origin for value in operands if value.origin and not value.constant]
        if not meant:
            # Not intended: the origin of the constant is a cause, where it is known.
            causes += [replace(value.origin, intended=False) for value in infinite if value.origin]
        number, iteration = self._equations, self._iterations[0] if self._iterations else 0
        known, nan = tuple(dict.fromkeys(causes)), bool(np.isnan(size))
        origin = Origin(number, primitive, scope, nan, known, iteration=iteration, intended=meant)
        if known and not origin.makes_nan:
            return origin
        return replace(
            origin,
            result=range_of(array),
            operands=operands_of(operands),
            array=array,
            line=source_line(eqn),
        )

    def _look_at_bits(
        self, primitive: str, scope: str, operands: list[ReplayValue], array: Any
    ) -> Origin | None:
        """The origin of integers that are the bits of a value that is not finite."""
        if not jnp.issubdtype(array.dtype, jnp.integer):
            return None
        causes = tuple(
            value.origin
            for value in operands
            if value.origin and (primitive == BITS or not is_float(value.array))
        )
        has_nan = any(cause.has_nan for cause in causes)
        return Origin(self._equations, primitive, scope, has_nan, causes) if causes else None

    def _note_extreme(
        self, size: float, array: Any, primitive: str, scope: str, operands: list[ReplayValue]
    ) -> None:
        share = size / float(jnp.finfo(array.dtype).max)
        if share > self.extreme.share and not all(operand.constant for operand in operands):
            source = ReplayValue(array, None, layer_named(scope), primitive).source
            self.extreme = Extreme(share, size, str(array.dtype), source)


def _read_constant(_: Any, constant: Any) -> ReplayValue:
    return as_constant(constant)


@cache
def layer_named(scope: str) -> str:
    """The layer of a name stack; "" outside of all layers."""
    return layer_of(scope)
