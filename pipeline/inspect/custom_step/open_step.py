"""Opening of a custom step on this machine's device, to measure its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import jax

from pipeline.backends.base import Executable
from pipeline.backends.loading.loader import Loader
from pipeline.backends.xla import XlaBackend
from pipeline.checkpoint.host_state import HostState
from pipeline.core.errors import RunError
from pipeline.engine.history import History
from pipeline.engine.hooks import Hooks
from pipeline.engine.loop import Program, exhaust, train
from pipeline.engine.non_finite_step import NonFiniteStepError
from pipeline.engine.run_sink import PreparedSink, default_device
from pipeline.engine.schedule import RunSchedule, Schedule
from pipeline.engine.step_checks import LOSS
from pipeline.engine.user_step import CustomState, SinkProgram
from pipeline.stages.autosink.dispatch_costs import DispatchClock, Timing
from pipeline.training.parallel.placement import DevicePlacement


@dataclass(frozen=True)
class OpenStep:
    """A checked step, the device, and the loader of its batches."""

    prepared: PreparedSink
    placement: DevicePlacement
    loader: Loader

    @property
    def name(self) -> str:
        function = self.prepared.step.function
        return str(getattr(function, "__name__", type(function).__name__))

    @property
    def device_text(self) -> str:
        """The device, as the commands print it."""
        return XlaBackend(self.placement).describe()["device"]

    @property
    def batch_size(self) -> int:
        """Number of examples in a batch: the length of its first array, or 1."""
        first = jax.tree.leaves(self.prepared.source.layout.spec)[0]
        return int(first.shape[0]) if first.shape else 1


@contextmanager
def open_step(prepared: PreparedSink, steps: int) -> Iterator[OpenStep]:
    """Open the data of at most `steps` steps, on the device that jax uses by default."""
    placement = DevicePlacement((default_device(),))
    loader = prepared.source.open_loader(placement, 0, steps)
    try:
        yield OpenStep(prepared, placement, loader)
    finally:
        loader.close()


def run_steps(executable: object, state: CustomState, schedule: RunSchedule) -> DispatchClock:
    """Run the steps of a schedule from step 0 in the engine's loop, without logs.

    `executable` is a `SinkProgram`, or has its methods. The state is consumed. Returns the clock
    with the end of each dispatch. Raises RunError if a loss isn't finite.
    """
    watch = DispatchClock()
    program = Program(cast(Executable, executable))
    state_of_loop = cast(Any, state)
    hooks = Hooks(monitors=(watch,))
    history = History(0)
    try:
        exhaust(train(program, state_of_loop, Schedule(schedule), hooks, HostState(), history))
    except NonFiniteStepError as error:
        reason = f"{LOSS} isn't finite, so its steps can't be timed"
        raise RunError(f"step {history.step + 1}: {reason}") from error
    return watch


def time_sinks(program: SinkProgram, state: CustomState, sink_steps: int, steps: int) -> Timing:
    """Time steps in sinks, without the first sink. Raises RunError if a loss isn't finite."""
    schedule = RunSchedule(steps, steps, sink_steps)
    return run_steps(program, program.put(state), schedule).make_timing(sink_steps)
