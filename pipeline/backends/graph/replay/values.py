"""The tensors of a replay: slicing, stacking, description and last use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pipeline.backends.graph.replay.origins import NamedTensor, Operand, Origin
from pipeline.backends.graph.replay.ranges import is_float, largest, range_of


@dataclass(frozen=True)
class ReplayValue:
    """A tensor in the replay."""

    array: Any
    named: NamedTensor | None = None
    layer: str = ""
    primitive: str = ""
    constant: bool = False
    """Computed from constants only."""
    origin: Origin | None = None
    """The origin of a value that is not finite; None for a constant of the program."""

    @property
    def source(self) -> str:
        """The tensor's name for the user."""
        if self.named is not None:
            return f"{self.named.kind} {self.named.name}".strip()
        if self.constant:
            return "constant"
        return f"{self.primitive} in {self.layer}" if self.layer else self.primitive


def is_finite(value: ReplayValue) -> bool:
    """Whether a tensor is finite; true for anything but floats."""
    return not is_float(value.array) or bool(np.isfinite(largest(value.array)))


def is_below(array: Any) -> bool:
    """Whether minus infinity, the padding and mask of maxima, is the only value not finite."""
    values = np.asarray(array)
    return not np.isnan(values).any() and not np.isposinf(values).any()


def operands_of(values: Sequence[ReplayValue]) -> tuple[Operand, ...]:
    """The floating-point operands of an equation, with their ranges."""
    return tuple(
        Operand(value.source, range_of(value.array), value.named)
        for value in values
        if is_float(value.array)
    )


def as_constant(array: Any) -> ReplayValue:
    """A number or an array of the program, as a constant value."""
    return ReplayValue(array if hasattr(array, "dtype") else np.asarray(array), constant=True)


def at_iteration(value: ReplayValue, iteration: int) -> ReplayValue:
    """The slice of a value that one iteration of a scan reads."""
    part = replace(value, array=value.array[iteration])
    return replace(part, origin=None) if is_float(part.array) and is_finite(part) else part


def stack_iterations(parts: list[ReplayValue], var: Any) -> ReplayValue:
    """The results of a scan's iterations, stacked along a new first axis."""
    if not parts:
        return ReplayValue(jnp.zeros((0, *var.aval.shape), var.aval.dtype))
    origins = [part.origin for part in parts if part.origin is not None]
    first = min(origins, key=lambda origin: origin.number) if origins else None
    array, constant = jnp.stack([part.array for part in parts]), all(p.constant for p in parts)
    return replace(parts[0], array=array, origin=first, constant=constant)
