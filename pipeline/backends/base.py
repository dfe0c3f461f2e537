"""The interface between a training run and its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import jax
import numpy as np

from pipeline.backends.loading.loader import Loader
from pipeline.backends.rates import Communication
from pipeline.backends.sink_choice import SinkChoice
from pipeline.models.lowerings.problem.lowering import Problem
from pipeline.models.lowerings.tune.tuner import LoweringChoice, Tuning
from pipeline.training.metrics import EvalSums
from pipeline.training.parallel.placement import DevicePlacement
from pipeline.training.parallel.sharding_rules import ShardingRules
from pipeline.training.parallel.state_sharing import StateSharing
from pipeline.training.state import TrainState
from pipeline.training.step import TrainStep
from pipeline.training.telemetry import Telemetry

Mechanism = Literal["loop", "soft", "none"]
"""How steps are dispatched: in sinks by a looping program or one by one, or without sinks."""


@dataclass(frozen=True)
class ProgramReport:
    """Report on a compiled program: the time that it took to compile, and its size."""

    name: str
    compile_s: float
    cache: Literal["hit", "miss", "off", "reused"]
    """hit: read from the persistent cache; miss: compiled and cached; off: compiled, not cached;
    reused: from an earlier run of this process."""
    temporary_bytes: int
    flops: float | None
    """Operations of a call, with a loop's body counted once; None if unknown."""
    figures: Mapping[str, Any] | None = None
    """Launches, copies and memory on an absent chip, as JSON; None on a present chip."""
    lines: tuple[str, ...] = ()
    """The figures as text."""
    calls_onednn: bool = False
    """Whether the program calls oneDNN. Caches on disk can't hold such a program."""


@dataclass(frozen=True)
class CompileReport:
    """Report of the compile stage: its programs, none in eager mode."""

    programs: tuple[ProgramReport, ...]
    single_steps: bool = False
    """Whether the programs have no loop, so that every step is a dispatch."""

    @property
    def compile_s(self) -> float:
        """Seconds spent in all programs together."""
        return sum(program.compile_s for program in self.programs)


@dataclass(frozen=True)
class CompileInputs:
    """Inputs of a backend: the step's pure functions, the loaders of batches, and the constants."""

    step: TrainStep
    train: Loader
    eval: Loader
    learning_rates: np.ndarray
    """A row for each update, as `TrainStep` expects them."""
    seed: np.ndarray
    """The words of the seed, uint32 (2,)."""
    constants: tuple[np.ndarray, ...] = ()
    """Last arguments of the step: the constants in which runs that share a program differ."""
    eager: bool = False
    """Whether operations run one by one instead of in compiled programs."""
    jit_layers: tuple[str, ...] = ()
    """Patterns of the paths of layers that eager mode compiles."""
    sharding_rules: ShardingRules | None = None
    """Rules by which XLA shards parameters; None if each device has all parameters."""
    sharing: StateSharing | None = None
    """The part of the state that each device stores; None if each stores the whole state."""
    single_steps: bool = False
    """Whether a program is one step, or one batch of an evaluation, without a loop around it."""
    recomputes: bool = False
    """Whether the backward pass of the step computes activations again."""
    train_sample: Loader | None = None
    """Training samples to evaluate, as many as evaluation samples; None: they aren't evaluated."""
    keeps_arguments: bool = False
    """Whether programs don't donate their arguments, so that a failed call can be repeated."""
    dispatch_steps: int | None = None
    """The most steps of a dispatch; None if the recipe leaves it open."""
    state: TrainState | None = None
    """Shapes of the state; None: as the step initialises it."""
    key: str | None = None
    """Digest of everything that decides the programs, their key on disk; None if unknown."""
    when_evaluation_compiled: Callable[[ProgramReport], None] | None = None
    """Called when a thread has compiled the evaluation; None: it is compiled before training."""


ProgressClock = Callable[[str], AbstractContextManager[object]]
"""(program name) -> context manager that shows a clock to the user during a compilation."""


class Executable(Protocol):
    """A compiled run."""

    @property
    def report(self) -> CompileReport:
        """Sizes and times of the compiled programs."""

    @property
    def program_text(self) -> str:
        """The text of the compiled training loop; empty in eager mode."""

    @property
    def loader(self) -> Loader:
        """The source of the batches that are trained on."""

    def init(self) -> TrainState:
        """Return the state at step 0."""

    def put(self, state: TrainState) -> TrainState:
        """Copy the state of a checkpoint to the device."""

    def set_learning_rates(self, rates: np.ndarray) -> None:
        """Replace the learning rates, float32, a row for each update, without a new shape."""

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        """Run steps `start + 1 .. stop` and return every record. The state is consumed.

        The run ends early at the first non-finite step, with the state of the step before.
        """

    def evaluate(
        self,
        state: TrainState,
        start: int,
        stop: int,
        before: EvalSums | None = None,
        *,
        on_train: bool = False,
    ) -> EvalSums:
        """Return sums over evaluation batches `start + 1 .. stop`, added to `before`.

        `before` is consumed. With `on_train` the batches are training samples. The sums are on the
        device, and complete when this returns.
        """


E = TypeVar("E", bound=Executable)
T = TypeVar("T")


class WrappedExecutable(Generic[E]):
    """An executable that passes its calls on to another; subclasses change some of them."""

    def __init__(self, executable: E) -> None:
        self._executable = executable

    def _call(self, name: str, method: Callable[[E], T]) -> T:
        """Call a method of the executable; `name` names what is computed in messages."""
        return method(self._executable)

    @property
    def report(self) -> CompileReport:
        return self._executable.report

    @property
    def program_text(self) -> str:
        return self._executable.program_text

    @property
    def loader(self) -> Loader:
        return self._executable.loader

    def init(self) -> TrainState:
        return self._call("step 0", lambda executable: executable.init())

    def put(self, state: TrainState) -> TrainState:
        return self._call("the state", lambda executable: executable.put(state))

    def set_learning_rates(self, rates: np.ndarray) -> None:
        self._executable.set_learning_rates(rates)

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        name = f"step {start + 1}"
        return self._call(name, lambda executable: executable.run(state, start, stop, mechanism))

    def evaluate(
        self,
        state: TrainState,
        start: int,
        stop: int,
        before: EvalSums | None = None,
        *,
        on_train: bool = False,
    ) -> EvalSums:
        return self._call(
            "evaluation",
            lambda executable: executable.evaluate(state, start, stop, before, on_train=on_train),
        )


SinkPrice = Callable[[int | None], float]
"""(sink length, None: without sinks) -> milliseconds per step."""


@dataclass(frozen=True)
class StepToPrice:
    """A run for an emulated device to price: shapes alone, no data and no weights.

    `step(state, batch) -> (state, loss)` is an update on a batch after its map ops. `batch(size)`
    returns the shapes of a batch. `sink_steps` is the length of a sink, even if `sink` is off. If
    the recipe leaves the length open, `choose_sink` chooses it by its price. `batch_size` counts
    the samples of all `devices`, which have equal shares of every batch.
    """

    name: str
    step: Callable[[Any, Any], tuple[Any, Any]]
    state: TrainState
    batch: Callable[[int], Any]
    batch_size: int
    sink: bool
    sink_steps: int
    steps_per_epoch: int
    total_steps: int
    devices: int = 1
    eager: bool = False
    keep_batchnorm_fp32: bool = False
    choose_sink: Callable[[SinkPrice], SinkChoice] | None = None
    is_batch_per_device: bool = False
    """Whether the recipe's batch size is for each device, not for all together."""
    exchange_bytes: tuple[int, ...] = ()
    """Bytes of each all-reduce of the devices besides the gradients'."""
    shares_state: bool = False
    """Whether each device stores a part of the parameters and of the optimizer's state."""

    @property
    def device_batch(self) -> int:
        """Samples of a batch that one device has."""
        return self.batch_size // self.devices


class Estimate(Protocol):
    """Modelled time of a step on an emulated device. No figure in it is measured.

    `str(estimate)` is the text that the user reads.
    """

    @property
    def device(self) -> str:
        """The modelled device, and the number of devices."""

    @property
    def step_ms(self) -> float:
        """Milliseconds of one step in the steady state."""

    @property
    def interval_ms(self) -> tuple[float, float]:
        """Bounds of the true time of a step, in 80 % of all cases."""

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all devices together."""

    @property
    def communication(self) -> Communication | None:
        """The all-reduces of several devices; None for one device."""

    @property
    def choice(self) -> SinkChoice | None:
        """The chosen sink, if `StepToPrice` left it open."""

    def summary(self) -> Mapping[str, Any]:
        """Return the object `modelled` of summary.json."""

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write reports into a run directory, and return the names of the files."""


class Backend(Protocol):
    """A device that can compile and run a step."""

    placement: DevicePlacement
    device: jax.Device
    """The device for measurements on a single device."""

    def describe(self) -> Mapping[str, str]:
        """Return the device and the versions that its numbers depend on, for the summary."""

    def choose_lowerings(
        self, problems: Sequence[Problem], tuning: Tuning, watch: ProgressClock
    ) -> LoweringChoice:
        """Choose how the layers of a network are computed. Raises RunError for a bad bank."""

    def compile(self, work: CompileInputs, watch: ProgressClock) -> Executable:
        """Compile a run. Raises RunError if the device can't run it."""

    def estimate(self, proposal: StepToPrice) -> Estimate | None:
        """Return the modelled time of a run on an emulated device; None on a real device.

        Raises RunError if the device can't run the step, and RecipeError for an option that the
        model doesn't have.
        """

    def choose_mechanism(
        self, requested: Literal["auto", "loop", "soft"], *, sink: bool
    ) -> tuple[Mechanism, str]:
        """Return the mechanism by which steps run on this device, and why."""
