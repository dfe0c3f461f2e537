"""`pipeline.sink`: a custom step function, many steps a dispatch, logged, saved and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

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
    """Train with a custom `step(state, batch) -> (state, metrics)`; yield a report a sink.

    `size` steps run as one program without the host: "auto" measures how many take about a second,
    "all" takes all. It changes no result. `metrics` is a dictionary of scalars; a step whose "loss"
    isn't finite ends the run with the state before it.

    `data` are arrays of examples, of which `batch_size` make a batch in an order that is a function
    of `seed` (None: as they lie), a structured array, or an iterable of batches such as a grain
    dataset.

    In the directory `save` go metrics.jsonl, TensorBoard's events and checkpoints: every
    `save_every` steps, else every minute, at the end, and on SIGTERM. The same call continues from
    the newest one. Leaving the loop early saves, too.

    Raises ValueError for a step, a state or a setting that can't work, DataError for such data and
    for a directory of another run, RunError if a loss isn't finite or the disk refuses, and
    Interrupted, once the run is saved, after a signal to stop.
    """
    from pipeline.engine.run_sink import prepare_sink, run_sink

    folder = None if save is None else Path(save)
    settings = SinkSettings(steps, size, folder, batch_size, seed, save_every)
    return run_sink(prepare_sink(step, state, data, settings))
