"""`pipeline.sink`: a loop of a custom step function, with logs, checkpoints and resuming."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pipeline.core.host.launchers import require_one_process
from pipeline.engine.sink_settings import SinkResult, SinkSettings


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
    SIGTERM, and if the caller leaves the loop; the newest five are kept. The same call continues
    from the newest checkpoint.

    Raises ValueError for an invalid step, state or setting; DataError for invalid data and for a
    directory of another run; RunError if a loss isn't finite, a file can't be written, or a
    launcher has started several processes. The call checks step, settings and data; the directory
    is opened for the first report. After a signal to stop, it saves and raises Interrupted.
    """
    from pipeline.engine.run_sink import prepare_sink, run_sink

    require_one_process(os.environ)
    if save == "":
        raise ValueError("save = '': must be a directory, or None")
    folder = None if save is None else Path(save)
    settings = SinkSettings(steps, size, folder, batch_size, seed, save_every)
    return run_sink(prepare_sink(step, state, data, settings))
