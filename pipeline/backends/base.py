"""The interface between a training run and its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import jax
import numpy as np

if TYPE_CHECKING:
    from pipeline.backends.loading.loader import Loader
    from pipeline.backends.rates import Communication
    from pipeline.backends.sink_choice import SinkChoice
    from pipeline.models.lowerings.problem import Problem
    from pipeline.models.lowerings.tune.tuner import LoweringChoice, Tuning
    from pipeline.training.metrics import EvalSums
    from pipeline.training.parallel.sharding_rules import ShardingRules
    from pipeline.training.parallel.state_sharing import DevicePlacement, StateSharing
    from pipeline.training.state import TrainState
    from pipeline.training.step import TrainStep
    from pipeline.training.telemetry import Telemetry

Mechanism = Literal["loop", "soft", "none"]
"""How steps are dispatched: a sink by a loop or by one call for each step, or without sinks."""
MECHANISM_TEXTS = {"loop": "as one program", "soft": "step by step without waiting"}
"""Texts that describe how a sink runs."""


@dataclass(frozen=True)
class ProgramReport:
    """The time that a program took to compile, its size and its work."""

    name: str
    compile_s: float
    cache: Literal["hit", "miss", "off", "reused"]
    """hit: read from the persistent cache; miss: compiled and cached; off: compiled, not cached;
    reused: from an earlier run of this process."""
    temporary_bytes: int
    flops: float | None
    """Floating-point operations of a call, with a loop's body counted once; None if unknown."""
    figures: Mapping[str, Any] | None = None
    """Launches, copies and memory on an absent chip, as JSON; None for a present chip."""
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
    """Everything that a backend needs to compile a run."""

    step: TrainStep
    train: Loader
    eval: Loader
    learning_rates: np.ndarray
    """A row for each update, as `TrainStep` expects them."""
    seed: np.ndarray
    """The words of the seed, uint32 (2,)."""
    constants: tuple[np.ndarray, ...] = ()
    """Last arguments of the step: numbers that differ between runs which share a program."""
    eager: bool = False
    """Whether operations run one by one instead of in compiled programs."""
    jit_layers: tuple[str, ...] = ()
    """Patterns of the paths of layers that eager mode compiles."""
    sharding_rules: ShardingRules | None = None
    """Rules by which XLA shards parameters; None if each device has all parameters."""
    sharing: StateSharing | None = None
    """The part of the state that each device stores; None if each stores the whole state."""
    equal_on_devices: bool = False
    """Whether results must have the same bits on any number of devices."""
    single_steps: bool = False
    """Whether a program is one step, or one batch of an evaluation, without a loop around it."""
    recomputes: bool = False
    """Whether the backward pass of the step computes activations again."""
    train_sample: Loader | None = None
    """Training samples to evaluate, as many as evaluation samples; None: no training samples."""
    keeps_arguments: bool = False
    """Whether programs don't donate their arguments, so that a failed call can be repeated."""
    dispatch_steps: int | None = None
    """Largest number of steps of a dispatch; None if the recipe doesn't set it."""
    state: TrainState | None = None
    """Shapes of the state; None: as the step initialises the state."""
    key: str | None = None
    """Digest of everything that determines the programs; None: they aren't stored on disk."""
    evaluates: bool = True
    """Whether evaluations are due, so that a thread may compile their program during training."""
    when_evaluation_compiled: Callable[[ProgramReport], None] | None = None
    """Called after a thread has compiled the evaluation; None: it is compiled before training."""


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
        """Replace the learning rates: float32, a row for each update, in the same shape."""

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        """Run steps `start + 1 .. stop`; return the state and the telemetry of the steps.

        Ends at the first non-finite step, with the state before it. The memory of the argument
        `state` is used again.
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

        The memory of `before` is used again. If `on_train`, the batches are training samples. The
        sums are on the device, and are computed when this returns.
        """


E = TypeVar("E", bound=Executable)
T = TypeVar("T")


class WrappedExecutable(Generic[E]):
    """An executable that passes its calls on to another. Subclasses change some of them."""

    def __init__(self, executable: E) -> None:
        self._executable = executable

    def _call(self, name: str, method: Callable[[E], T]) -> T:
        """Call a method of the executable; `name` is the name of its result in messages."""
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
"""Function from the length of a sink, None without sinks, to milliseconds per step."""


@dataclass(frozen=True)
class StepToPrice:
    """A run whose step an emulated device estimates, by shapes without data or weights."""

    name: str
    step: Callable[[Any, Any], tuple[Any, Any]]
    """`step(state, batch) -> (state, loss)`, an update on a batch after its map ops."""
    state: TrainState
    batch: Callable[[int], Any]
    """Function from a batch size to the shapes of a batch."""
    batch_size: int
    """Number of samples of a batch on all devices together."""
    sink: bool
    sink_steps: int
    """Number of steps of a sink, even if `sink` is off."""
    steps_per_epoch: int
    total_steps: int
    devices: int = 1
    """Number of devices. They have equal parts of every batch."""
    eager: bool = False
    keep_batchnorm_fp32: bool = False
    choose_sink: Callable[[SinkPrice], SinkChoice] | None = None
    """Chooses the sink by its price; None if the recipe sets it."""
    is_batch_per_device: bool = False
    """Whether the recipe's batch size is for each device, not for all together."""
    exchange_bytes: tuple[int, ...] = ()
    """Bytes of each all-reduce in a step, without all-reduces of gradients."""
    shares_state: bool = False
    """Whether each device stores a part of the parameters and of the optimizer's state."""

    @property
    def device_batch(self) -> int:
        """Number of samples of a batch on one device."""
        return self.batch_size // self.devices


class Estimate(Protocol):
    """Modelled time of a step on an emulated device. `str(estimate)` is a text for the user."""

    @property
    def device(self) -> str:
        """The modelled device, and the number of devices."""

    @property
    def step_ms(self) -> float:
        """Milliseconds of one step in the steady state."""

    @property
    def interval_ms(self) -> tuple[float, float]:
        """Lower and upper bound of the milliseconds of a step, which hold in 80 % of cases."""

    @property
    def time_range(self) -> str:
        """How long the step takes in tuned code and in other code."""

    @property
    def track_record(self) -> str:
        """How far published steps were from modelled ones."""

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all devices together."""

    @property
    def communication(self) -> Communication | None:
        """The all-reduces of several devices; None for one device."""

    @property
    def choice(self) -> SinkChoice | None:
        """The sink that `StepToPrice.choose_sink` chose; None without that function."""

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
        """Choose the lowerings of a network's layers. Raises RunError for a damaged bank."""

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
        """Return the mechanism by which steps run on this device, and the reason."""
