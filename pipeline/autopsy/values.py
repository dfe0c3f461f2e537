"""The tensors of a replay: cut, stacked, looked at, and let go when nobody reads them any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from pipeline.autopsy.origins import NamedTensor, Operand, Origin
from pipeline.autopsy.ranges import is_float, largest, range_of


@dataclass(frozen=True)
class ReplayValue:
    """A tensor in the replay."""

    array: Any
    named: NamedTensor | None = None
    layer: str = ""
    primitive: str = ""
    constant: bool = False
    """Made of constants alone."""
    origin: Origin | None = None
    """Where it is not finite, and no constant of the program."""

    @property
    def source(self) -> str:
        """What the user knows it by."""
        if self.named is not None:
            return f"{self.named.kind} {self.named.name}".strip()
        if self.constant:
            return "constant"
        return f"{self.primitive} in {self.layer}" if self.layer else self.primitive


def is_finite(value: ReplayValue) -> bool:
    """Whether a tensor is finite; what is no float is."""
    return not is_float(value.array) or bool(np.isfinite(largest(value.array)))


def is_below(array: Any) -> bool:
    """Whether all that is not finite is minus infinity, as maxima are padded and masked with."""
    values = np.asarray(array)
    return not np.isnan(values).any() and not np.isposinf(values).any()


def operands_of(values: Sequence[ReplayValue]) -> tuple[Operand, ...]:
    """What is worth telling of the floats among what an equation read."""
    return tuple(
        Operand(value.source, range_of(value.array), value.named)
        for value in values
        if is_float(value.array)
    )


def as_constant(array: Any) -> ReplayValue:
    """A number or an array that a program holds."""
    return ReplayValue(array if hasattr(array, "dtype") else np.asarray(array), constant=True)


def at_iteration(value: ReplayValue, iteration: int) -> ReplayValue:
    """What a iteration of a scan reads of a value."""
    part = replace(value, array=value.array[iteration])
    return replace(part, origin=None) if is_float(part.array) and is_finite(part) else part


def stack_iterations(parts: list[ReplayValue], var: Any) -> ReplayValue:
    """What the iterations of a scan gave, one upon the other."""
    if not parts:
        return ReplayValue(jnp.zeros((0, *var.aval.shape), var.aval.dtype))
    origins = [part.origin for part in parts if part.origin is not None]
    first = min(origins, key=lambda origin: origin.number) if origins else None
    array, constant = jnp.stack([part.array for part in parts]), all(p.constant for p in parts)
    return replace(parts[0], array=array, origin=first, constant=constant)


def last_uses(jaxpr: Any) -> list[list[Any]]:
    """Behind each equation of a jaxpr, the variables that nothing reads any more."""
    kept = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    dead: list[list[Any]] = [[] for _ in jaxpr.eqns]
    for index in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[index]
        named = [atom for atom in (*eqn.invars, *eqn.outvars) if not isinstance(atom, core.Literal)]
        for var in named:
            if var not in kept:
                kept.add(var)
                dead[index].append(var)
    return dead
