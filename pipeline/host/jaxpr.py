"""Calls, loops and branches in jaxprs, read alike in all versions of JAX.

The package's interpreters of jaxprs get the parts of these equations here. A `ClosedJaxpr` is a
`Jaxpr` that knows its constants since JAX 0.12; before, equations hold the one or the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

T = TypeVar("T")

CALLS: Mapping[str, str] = MappingProxyType(
    {
        "jit": "jaxpr",
        "pjit": "jaxpr",
        "closed_call": "call_jaxpr",
        "core_call": "call_jaxpr",
        "eval_jaxpr": "call_jaxpr",
        "checkpoint": "jaxpr",
        "remat2": "jaxpr",
        "custom_jvp_call": "call_jaxpr",
        "custom_vjp_call": "call_jaxpr",
    }
)
"""Primitives that call a jaxpr once, with the parameter that holds it. Versions of JAX differ in
the names: `closed_call` is `eval_jaxpr` since 0.12."""
FLOW = ("scan", "while", "cond")
"""Primitives of loops and branches."""

Run = Callable[[ClosedJaxpr, Sequence[Any]], list[Any]]
"""Computes the results of a jaxpr for its operands."""


@dataclass(frozen=True)
class Scan:
    """A `scan`: its operands are constants, the carry and what is sliced, in this order."""

    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int

    def split_operands(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Return the constants, the carry and what is sliced."""
        first, second = self.num_consts, self.num_consts + self.num_carry
        return list(operands[:first]), list(operands[first:second]), list(operands[second:])


@dataclass(frozen=True)
class While:
    """A `while`: its operands are constants of the condition, of the body, and the carry."""

    condition: ClosedJaxpr
    body: ClosedJaxpr
    num_condition_consts: int
    num_body_consts: int

    def split_operands(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Return the constants of the condition, those of the body, and the carry."""
        first = self.num_condition_consts
        second = first + self.num_body_consts
        return list(operands[:first]), list(operands[first:second]), list(operands[second:])


def called_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Return the jaxpr that an equation calls once; None for a loop, branches or an operation."""
    parameter = CALLS.get(equation.primitive.name)
    return None if parameter is None else as_closed(equation.params[parameter])


def as_closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr with its constants; one that doesn't know any has none."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def read_scan(equation: JaxprEqn) -> Scan:
    """Return the parts of a `scan`."""
    params = equation.params
    if "ft_in" in params:
        # Since JAX 0.11 the operands are three groups of a tree.
        consts, carry, _ = map(len, params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
    return Scan(
        params["jaxpr"], consts, carry, params["length"], params["reverse"], params["unroll"]
    )


def read_while(equation: JaxprEqn) -> While:
    """Return the parts of a `while`."""
    params = equation.params
    return While(
        params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"], params["body_nconsts"]
    )


def compute_flow(equation: JaxprEqn, operands: Sequence[Any], run: Run) -> list[Any]:
    """Compute a loop or branches as the equation does, with `run` for the jaxprs inside."""
    match equation.primitive.name:
        case "scan":
            return _compute_scan(read_scan(equation), operands, run)
        case "while":
            return _compute_while(read_while(equation), operands, run)
        case _:
            branches = [partial(_call, run, branch) for branch in equation.params["branches"]]
            return list(lax.switch(operands[0], branches, *operands[1:]))


def _call(run: Run, jaxpr: ClosedJaxpr, *operands: Any) -> list[Any]:
    return run(jaxpr, operands)


def _compute_scan(scan: Scan, operands: Sequence[Any], run: Run) -> list[Any]:
    consts, initial, sliced = scan.split_operands(operands)

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = run(scan.body, [*consts, *carry, *slices])
        return results[: scan.num_carry], results[scan.num_carry :]

    carry, stacked = lax.scan(
        step, initial, sliced, length=scan.length, reverse=scan.reverse, unroll=scan.unroll
    )
    return [*carry, *stacked]


def _compute_while(loop: While, operands: Sequence[Any], run: Run) -> list[Any]:
    condition_consts, body_consts, initial = loop.split_operands(operands)
    return list(
        lax.while_loop(
            lambda carry: run(loop.condition, [*condition_consts, *carry])[0],
            lambda carry: run(loop.body, [*body_consts, *carry]),
            initial,
        )
    )
