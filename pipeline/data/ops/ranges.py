"""Parameters drawn from a range, the same to the bit on every device.

A drawn number is one of `STEPS` even steps of its range. Functions of it, a sine or a square
root, are computed for every step on the host in float64 and looked up: XLA's functions differ from
numpy's in the last place, which a rounding after them could make a whole pixel.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Strict

from pipeline.data.random import integers

STEPS = 4096


def _check_order(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"the range {list(bounds)} ends before it begins; give [least, most]")
    return bounds


Range = Annotated[tuple[float, float], Strict(False), AfterValidator(_check_order)]
"""[least, most]; drawn evenly between them."""


def steps(least: float, most: float) -> np.ndarray:
    """The middles of a range's steps, float64 (STEPS,); of a range of one value, that value."""
    if least == most:
        return np.array([least])
    return least + (most - least) * (np.arange(STEPS) + 0.5) / STEPS


def pick(xp: Any, uniforms: Any, table: np.ndarray) -> Any:
    """Draw rows of a table uniformly: (*uniforms.shape, *table.shape[1:])."""
    return xp.asarray(table)[integers(xp, uniforms, len(table))]
