"""The seam between a training run and the device it runs on: one file per backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import numpy as np

from pipeline.data.feed.feed import Feed
from pipeline.lowerings.problem.lowering import Problem
from pipeline.lowerings.tune.tuner import LoweringChoice, Tuning
from pipeline.sink.choice import SinkChoice
from pipeline.sink.telemetry import Telemetry
from pipeline.training.metrics import EvalSums
from pipeline.training.state import TrainState
from pipeline.training.step import TrainStep

Mechanism = Literal["loop", "soft", "none"]


@dataclass(frozen=True)
class Program:
    """One compiled program and what compiling it took."""

    name: str
    compile_s: float
    cache: Literal["hit", "miss", "off"]
    temporary_bytes: int
    flops: float | None


@dataclass(frozen=True)
class CompileReport:
    """What the compile stage made."""

    programs: tuple[Program, ...]

    @property
    def compile_s(self) -> float:
        """Seconds spent in all programs together."""
        return sum(program.compile_s for program in self.programs)


@dataclass(frozen=True)
class CompileInputs:
    """What a backend is given: the pure functions, where batches come from, and the constants."""

    step: TrainStep
    train: Feed
    eval: Feed
    learning_rates: np.ndarray
    seed: np.ndarray
    eager: bool = False
    """Run every operation by itself instead of compiled programs."""


ProgressClock = Callable[[str], AbstractContextManager[object]]
"""Called with what is being compiled, around compiling it: the clock that the user sees."""


class Executable(Protocol):
    """A run, compiled."""

    report: CompileReport
    feed: Feed
    """Where the batches that are trained on come from."""

    def init(self) -> TrainState:
        """The state at step 0."""

    def put(self, state: TrainState) -> TrainState:
        """A state read from a checkpoint, moved to the device."""

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        """Run steps `start + 1 .. stop` and bring back every record; the given state is consumed.

        Ends early at the first step that is not finite, with the state of the step before.
        """

    def evaluate(
        self, state: TrainState, start: int, stop: int, before: EvalSums | None = None
    ) -> EvalSums:
        """Sums over evaluation batches `start + 1 .. stop`, added to those of the batches before.

        They are complete when it returns, and on the device: those before are consumed.
        """


SinkPrice = Callable[[int | None], float]
"""Milliseconds a step in sinks of so many steps, or (None) without sinks."""


@dataclass(frozen=True)
class StepToPrice:
    """A run as an emulated device is asked about it: shapes alone, no data and no weights.

    `step(state, batch) -> (state, loss)` is one update on a batch as the map ops leave it,
    `batch(size)` the shapes of one of any size. `sink_steps` is the length of a sink, also where
    `sink` is off. Where the recipe leaves it open, `choose_sink` chooses by the price of each.
    `total_steps(devices)` is the length of the run where each device has its share of the data;
    None where a share does not fill a batch.
    """

    name: str
    step: Callable[[Any, Any], tuple[Any, Any]]
    state: TrainState
    batch: Callable[[int], Any]
    batch_size: int
    sink: bool
    sink_steps: int
    total_steps: Callable[[int], int | None]
    eager: bool = False
    choose_sink: Callable[[SinkPrice], SinkChoice] | None = None


class Estimate(Protocol):
    """What the model of a device says of a step. No figure in it is measured.

    As text it is what the user reads.
    """

    @property
    def device(self) -> str:
        """The device that is modelled, and how many of it."""

    @property
    def step_ms(self) -> float:
        """One steady step."""

    @property
    def interval_ms(self) -> tuple[float, float]:
        """Between these the true time of a step lies in 80 % of all cases."""

    @property
    def samples_per_s(self) -> float:
        """Of all devices together."""

    @property
    def choice(self) -> SinkChoice | None:
        """The sink that was chosen, where the proposal left it open."""

    def summary(self) -> Mapping[str, Any]:
        """What summary.json holds under `modelled`."""

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write what there is to look at into a run directory; the names of the files."""


class Backend(Protocol):
    """A device that can compile and run a step."""

    device: jax.Device

    def describe(self) -> Mapping[str, str]:
        """The device and the versions that decide its numbers, for the summary."""

    def choose_lowerings(
        self, problems: Sequence[Problem], tuning: Tuning, watch: ProgressClock
    ) -> LoweringChoice:
        """How the layers of a network are computed here. Raises RunError for a bad bank."""

    def compile(self, work: CompileInputs, watch: ProgressClock) -> Executable:
        """Compile a run. Raises RunError when the device can't take it."""

    def estimate(self, proposal: StepToPrice) -> Estimate | None:
        """What a run would cost, on a device that is emulated; None on one that is there.

        Raises RunError when the device can't take it, RecipeError when it can't be asked to.
        """

    def mechanism(
        self, asked: Literal["auto", "loop", "soft"], *, sink: bool
    ) -> tuple[Mechanism, str]:
        """How steps will run on this device, and why."""
