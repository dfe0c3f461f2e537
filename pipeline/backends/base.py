"""The seam between a training run and the device it runs on: one file per backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import numpy as np

from pipeline.data.feed import Feed
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
class Work:
    """What a backend is given: the pure functions, where batches come from, and the constants."""

    step: TrainStep
    train: Feed
    eval: Feed
    learning_rates: np.ndarray
    seed: np.ndarray


Watch = Callable[[str], AbstractContextManager[object]]
"""Called with what is being compiled, around compiling it: the clock that the user sees."""


class Executable(Protocol):
    """A run, compiled."""

    report: CompileReport

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

    def evaluate(self, state: TrainState, batches: int) -> EvalSums:
        """Sums over the first so many evaluation batches."""


class Backend(Protocol):
    """A device that can compile and run a step."""

    device: jax.Device

    def describe(self) -> Mapping[str, str]:
        """The device and the versions that decide its numbers, for the summary."""

    def compile(self, work: Work, watch: Watch) -> Executable:
        """Compile a run. Raises RunError when the device can't take it."""

    def mechanism(
        self, asked: Literal["auto", "loop", "soft"], *, sink: bool
    ) -> tuple[Mechanism, str]:
        """How steps will run on this device, and why."""
