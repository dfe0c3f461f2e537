"""Trip counts of while loops, where they can be derived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core


def trip_count(eqn: Any) -> int | None:
    """Return the trip count of a `while` equation that counts by one up to a literal, else None."""
    cond = eqn.params["cond_jaxpr"].jaxpr
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt":
        return None
    counter, limit = cond.eqns[0].invars
    start = eqn.invars[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] :]
    limit = _literal(limit, cond.invars, eqn.invars[: eqn.params["cond_nconsts"]])
    if isinstance(counter, core.Literal) or limit is None:
        return None
    position = cond.invars.index(counter) - eqn.params["cond_nconsts"]
    first = _literal(start[position], (), ())
    if first is None or not _counts_by_one(eqn, position):
        return None
    return max(0, limit - first)


def _literal(atom: Any, variables: Sequence[Any], arguments: Sequence[Any]) -> int | None:
    if not isinstance(atom, core.Literal) and atom in variables[: len(arguments)]:
        atom = arguments[list(variables).index(atom)]
    return int(atom.val) if isinstance(atom, core.Literal) else None


def _counts_by_one(eqn: Any, position: int) -> bool:
    body = eqn.params["body_jaxpr"].jaxpr
    before = body.invars[eqn.params["body_nconsts"] + position]
    after = body.outvars[position]
    return any(
        inner.primitive.name == "add"
        and after in inner.outvars
        and before in inner.invars
        and any(isinstance(atom, core.Literal) and atom.val == 1 for atom in inner.invars)
        for inner in body.eqns
    )
