"""The program that training runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from pipeline.backends.base import Executable, Mechanism
    from pipeline.training.part_specs import RateRule


@dataclass(frozen=True)
class Program:
    """A compiled step with its batches, and the learning rates that callbacks may change."""

    executable: Executable
    mechanism: Mechanism = "loop"
    learning_rates: np.ndarray | None = None
    """float32, a row for each update; None if they can't be changed."""
    rate_rules: Sequence[RateRule] = ()
    """The rules of the columns after the first."""
