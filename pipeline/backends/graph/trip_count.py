"""Trip counts of while loops, where they can be derived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from pipeline.core.host.jaxpr import While, read_while


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
