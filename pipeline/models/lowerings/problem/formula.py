"""A formula of some problems, and its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array

from pipeline.models.lowerings.problem.lowering import Engine


@dataclass(frozen=True)
class Formula:
    """A computation, `compute(problem, lowering, *operands)`, and the problems that it fits."""

    compute: Callable[..., Array]
    fits: Callable[[Any], bool]
    engines: tuple[Engine, ...] = ("xla", "onednn")
    chunked: bool = False


def always(problem: Any) -> bool:
    """True, for a formula that fits every problem of its kind."""
    return True
