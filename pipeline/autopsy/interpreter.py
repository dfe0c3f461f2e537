"""Running a jaxpr equation by equation, looking at every result.

Calls are inlined, loops turn and branches are taken as the values say, so every equation that runs
is one of the user's network, the loss or the map ops, with the scope that it was traced in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from pipeline.autopsy.origins import COLUMN, MOVES, Named, Origin
from pipeline.autopsy.ranges import is_float, largest, range_of
from pipeline.autopsy.values import (
    Value,
    as_constant,
    at_iteration,
    is_below,
    is_finite,
    last_uses,
    operands_of,
    stack_iterations,
)
from pipeline.models.modules.name_stack import layer_of

CALLS: Mapping[str, str] = MappingProxyType(
    {
        "jit": "jaxpr",
        "pjit": "jaxpr",
        "closed_call": "call_jaxpr",
        "core_call": "call_jaxpr",
        "checkpoint": "jaxpr",
        "custom_jvp_call": "call_jaxpr",
        "custom_vjp_call": "call_jaxpr",
    }
)
"""Primitives that call a jaxpr, which is under this parameter."""

BITS = "bitcast_convert_type"

Names = Mapping[Any, Named]
"""What variables of a jaxpr are called."""


@dataclass(frozen=True)
class Extreme:
    """How near a finite value came to the end of its type."""

    share: float = 0.0
    """Of the greatest number that the type can hold."""
    value: float = 0.0
    dtype: str = ""
    source: str = ""


@dataclass
class Interpreter:
    """Runs jaxprs and keeps what is worth knowing of the values that it saw."""

    layer_inputs: dict[str, list[Value]] = field(default_factory=dict)
    """What each layer read of what others gave, in the forward pass."""
    extreme: Extreme = field(default_factory=Extreme)
    _equations: int = 0
    _turns: list[int] = field(default_factory=list)

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        inputs: Sequence[Value],
        scope: str = "",
        names: Names = MappingProxyType({}),
    ) -> list[Value]:
        """The outputs of a jaxpr for its inputs."""
        env: dict[Any, Value] = {
            var: as_constant(value) for var, value in zip(jaxpr.constvars, consts, strict=True)
        }
        env |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            return as_constant(atom.val) if isinstance(atom, core.Literal) else env[atom]

        for eqn, dead in zip(jaxpr.eqns, last_uses(jaxpr), strict=True):
            outputs = self._equation(eqn, [read(atom) for atom in eqn.invars], scope)
            for var, output in zip(eqn.outvars, outputs, strict=True):
                env[var] = replace(output, named=names[var]) if var in names else output
            for var in dead:
                del env[var]
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[Value], around: str) -> list[Value]:
        name = eqn.primitive.name
        stack = str(eqn.source_info.name_stack)
        scope = "/".join(part for part in (around, stack) if part)
        if name == "scan":
            return self._scan(eqn.params, operands, scope)
        if name == "while":
            return self._while(eqn.params, operands, scope)
        if name == "cond":
            branches, index = eqn.params["branches"], int(operands[0].array)
            chosen = branches[min(max(index, 0), len(branches) - 1)]
            return self.run(chosen.jaxpr, chosen.consts, operands[1:], scope)
        if name in CALLS:
            called = eqn.params[CALLS[name]]
            inner, consts = getattr(called, "jaxpr", called), getattr(called, "consts", ())
            return self.run(inner, consts, operands, scope)
        return self._compute(eqn, operands, scope)

    def _scan(self, params: Mapping[str, Any], operands: list[Value], scope: str) -> list[Value]:
        body, carried = params["jaxpr"], params["num_carry"]
        first = params["num_consts"] + carried
        consts, carry = operands[: params["num_consts"]], operands[params["num_consts"] : first]
        turns = range(params["length"])
        made: dict[int, list[Value]] = {}
        for turn in reversed(turns) if params["reverse"] else turns:
            sliced = [at_iteration(value, turn) for value in operands[first:]]
            with self._in_turn(turn):
                outputs = self.run(body.jaxpr, body.consts, [*consts, *carry, *sliced], scope)
            carry, made[turn] = outputs[:carried], outputs[carried:]
        stacked = [
            stack_iterations([made[turn][at] for turn in turns], var)
            for at, var in enumerate(body.jaxpr.outvars[carried:])
        ]
        return [*carry, *stacked]

    @contextmanager
    def _in_turn(self, turn: int) -> Iterator[None]:
        self._turns.append(turn)
        yield
        self._turns.pop()

    def _while(self, params: Mapping[str, Any], operands: list[Value], scope: str) -> list[Value]:
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_condition, of_body = operands[:first], operands[first:second]
        carry = operands[second:]
        while True:
            (should_continue,) = self.run(
                condition.jaxpr, condition.consts, [*of_condition, *carry], scope
            )
            if not bool(should_continue.array):
                return carry
            carry = self.run(body.jaxpr, body.consts, [*of_body, *carry], scope)

    def _compute(self, eqn: Any, operands: list[Value], scope: str) -> list[Value]:
        params = eqn.primitive.get_bind_params(eqn.params)
        with eqn.ctx.manager:
            made = eqn.primitive.bind(*(operand.array for operand in operands), **params)
        arrays = made if eqn.primitive.multiple_results else [made]
        self._equations += 1
        layer, name = layer_named(scope), eqn.primitive.name
        if "jvp(" in scope and "transpose(" not in scope:
            self._note_inputs(layer, operands)
        constant = all(operand.constant for operand in operands)
        return [
            Value(array, None, layer, name, constant, self._look(name, scope, operands, array))
            for array in arrays
        ]

    def _note_inputs(self, layer: str, operands: list[Value]) -> None:
        known = self.layer_inputs.setdefault(layer, [])
        for operand in operands:
            inner = operand.constant or operand.layer == layer
            named = operand.named is not None and operand.named.kind != COLUMN
            is_new = all(operand.array is not value.array for value in known)
            if is_new and not (inner or named) and is_float(operand.array):
                known.append(operand)

    def _look(self, primitive: str, scope: str, operands: list[Value], array: Any) -> Origin | None:
        """Where a result comes from, if it is not finite."""
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
            # Nobody meant this: what made the constant is to blame, where that is known.
            causes += [replace(value.origin, intended=False) for value in infinite if value.origin]
        number, turn = self._equations, self._turns[0] if self._turns else 0
        known, nan = tuple(dict.fromkeys(causes)), bool(np.isnan(size))
        origin = Origin(number, primitive, scope, nan, known, turn=turn, intended=meant)
        if known and not origin.makes_nan:
            return origin
        return replace(origin, result=range_of(array), operands=operands_of(operands), array=array)

    def _look_at_bits(
        self, primitive: str, scope: str, operands: list[Value], array: Any
    ) -> Origin | None:
        """Where whole numbers come from that are the bits of something not finite."""
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
        self, size: float, array: Any, primitive: str, scope: str, operands: list[Value]
    ) -> None:
        share = size / float(jnp.finfo(array.dtype).max)
        if share > self.extreme.share and not all(operand.constant for operand in operands):
            source = Value(array, None, layer_named(scope), primitive).source
            self.extreme = Extreme(share, size, str(array.dtype), source)


@cache
def layer_named(scope: str) -> str:
    """The layer that a name stack is of; "" outside of all."""
    return layer_of(scope)
