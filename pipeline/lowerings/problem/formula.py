"""A formula for some problems, and what may be varied of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array

from pipeline.lowerings.problem.lowering import Engine


@dataclass(frozen=True)
class Formula:
    """How a problem is computed, `compute(problem, lowering, *operands)`, and which problems."""

    compute: Callable[..., Array]
    fits: Callable[[Any], bool]
    engines: tuple[Engine, ...] = ("xla", "onednn")
    chunked: bool = False


def always(problem: Any) -> bool:
    """For a formula that suits every problem of its kind."""
    return True
