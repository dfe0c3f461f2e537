"""`pipeline.sink`: a loop of a custom step function, with logs, checkpoints and resuming."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.core.host.launchers import require_one_process


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
    """Metrics by name, with a value for every step of the sink, float32 (steps,)."""
    seconds: float
    """Seconds of the steps of the sink."""
    read_state: Callable[[], Any] = field(repr=False)

    @cached_property
    def state(self) -> Any:
        """Copy of the state after the sink, in the step function's structure. Raises RunError if
        it is read for the first time after the loop has continued."""
        return self.read_state()


def sink(
    step: Callable[[Any, Any], tuple[Any, Mapping[str, Any]]],
    state: Any,
    data: Any,
    *,
    steps: int,
    size: int | Literal["auto", "all"] = "auto",
    save: str | Path | None = None,
    batch_size: int | None = None,
    seed: int | None = 0,
    save_every: int | None = None,
) -> Iterator[SinkResult]:
    """Train with a custom `step(state, batch) -> (state, metrics)`; yield a report per sink.

    A sink has `size` steps, which run without the host: "auto" measures how many steps take about
    a second, "all" is all steps. The size doesn't change results. `metrics` is a dictionary of
    scalars; a step whose "loss" isn't finite ends the run with the state before it.

    `data` are arrays of examples, a structured array, or an iterable of batches such as a grain
    dataset. `batch_size` examples make a batch, in an order that is a function of `seed` (None:
    their order in the arrays).

    The run writes metrics.jsonl, TensorBoard's events and checkpoints to the directory `save`.
    Checkpoints are saved every `save_every` steps or by default every minute, at the end, on
    SIGTERM, and if the caller leaves the loop. The same call continues from the newest checkpoint.

    Raises ValueError for an invalid step, state or setting; DataError for invalid data and for a
    directory of another run; RunError if a loss isn't finite, a file can't be written, or a
    launcher has started several processes. After a signal to stop, it saves and raises Interrupted.
    """
    from pipeline.engine.run_sink import prepare_sink, run_sink

    require_one_process(os.environ)
    folder = None if save is None else Path(save)
    settings = SinkSettings(steps, size, folder, batch_size, seed, save_every)
    return run_sink(prepare_sink(step, state, data, settings))
