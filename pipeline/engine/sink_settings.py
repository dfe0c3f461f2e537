"""Settings of a custom loop, and its results.

`pipeline.sink` names them in its types without importing the loop, which takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class SinkSettings:
    """Settings of a custom loop: arguments of `pipeline.sink`."""

    steps: int
    size: int | Literal["auto", "all"] = "auto"
    save: Path | None = None
    batch_size: int | None = None
    seed: int | None = 0
    save_every: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid number."""
        _require_count("steps", self.steps)
        if self.size not in ("auto", "all"):
            _require_count("size", self.size, ', "auto" or "all"')
        if self.save_every is not None:
            _require_count("save_every", self.save_every)
            if self.save is None:
                raise ValueError(f"save_every = {self.save_every}: needs save, a directory")


def _require_count(name: str, value: object, alternatives: str = "") -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} = {value!r}: must be a whole number of at least 1{alternatives}")


@dataclass(frozen=True)
class SinkResult:
    """A sink that ended."""

    step: int
    """Number of steps done."""
    metrics: Mapping[str, np.ndarray]
    """Metrics by name, with a value for every step of the sink, float32 (steps,); of a run that
    was finished before, for its last step."""
    seconds: float
    """Seconds of the steps of the sink."""
    read_state: Callable[[], Any] = field(repr=False)

    @cached_property
    def state(self) -> Any:
        """Copy of the state after the sink, in the step function's structure. Raises RunError if
        it is read for the first time after the loop has continued."""
        return self.read_state()
