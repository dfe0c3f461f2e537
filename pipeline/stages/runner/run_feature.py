"""Features of a run: what a run does besides its stages, as objects that it calls at moments.

`pipeline.stages.runner.run_features` has their list and calls them in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.backends.base import Estimate, Executable
    from pipeline.checkpoint.checkpointer import Copies
    from pipeline.checkpoint.host_state import HostState
    from pipeline.config.recipe import Recipe
    from pipeline.data.inputs import Dataset
    from pipeline.engine.callbacks.callback import Monitor
    from pipeline.engine.history import Examination, History
    from pipeline.stages.autosink.sink_plan import SinkPlan
    from pipeline.stages.compile import CompileOptions
    from pipeline.stages.record.summary import Summary
    from pipeline.stages.runner.context import BuiltRun, CompiledRun, RunContext, RunOptions
    from pipeline.stages.runner.evaluations import Evaluations
    from pipeline.training.parallel.ranks import Ranks
    from pipeline.training.state import TrainState

RestoreRun = Callable[[Path], None]
"""Copies the run to resume into a new, empty directory."""


class RunFeature:
    """One thing that a run does besides its stages, such as a profile or a search for sinks.

    A run makes it from the recipe, and calls its methods in the order below. A subclass overrides
    those of the moments at which it acts. All may raise PipelineError. With several processes, each
    process calls them.
    """

    restore_s: float | None = None
    """Most seconds that other processes wait for `restore_run`; None: as for other decisions."""

    def __init__(self, recipe: Recipe) -> None:
        """Before anything: the recipe as it was composed, not yet fitted to processes."""

    def launch(self, recipe: Recipe, options: RunOptions, features: RunFeature) -> Summary | None:
        """Before the run has a directory: run in other processes; None to run in this one.

        `features` are all features of the run.
        """
        return None

    @contextmanager
    def join(self, recipe: Recipe) -> Iterator[Ranks | None]:
        """In the body, the run is connected to its other processes; yields None without any."""
        yield None

    def fit(self, recipe: Recipe, processes: int) -> Recipe:
        """The number of processes is known. Returns the recipe, or one that fits them."""
        return recipe

    def find_run(self, recipe: Recipe) -> Path | None:
        """Before the run has a directory, in the first process: find the run to resume."""
        return None

    def restore_run(self, recipe: Recipe, run_dir: Path | None) -> RestoreRun | None:
        """Then in the first process: find a run to resume elsewhere.

        `run_dir` is the run to resume here, None without one. Returns None to leave it so.
        """
        return None

    def resume(self, recipe: Recipe, run_dir: Path) -> Recipe:
        """The run to resume is in `run_dir`. Returns the recipe, or one with what it has chosen."""
        return recipe

    def begin(self, context: RunContext) -> None:
        """The directory is open, and nothing is read yet."""

    def change_data(self, context: RunContext, dataset: Dataset) -> Dataset:
        """The data are read, and not yet recorded. Returns them, or others."""
        return dataset

    def plan(self, built_run: BuiltRun) -> BuiltRun:
        """The step is built. Returns the run, or one with other devices."""
        return built_run

    def price(self, built_run: BuiltRun) -> Estimate | None:
        """The weights of `checkpoint.restore` are read. Returns modelled times, or None."""
        return None

    def shorten(self, built_run: BuiltRun) -> BuiltRun:
        """Programs are needed next. Returns the run, or one with fewer steps."""
        return built_run

    def compile(self, built_run: BuiltRun, options: CompileOptions) -> Executable | None:
        """The step is lowered. Returns its programs; None leaves them to the stage."""
        return None

    def start_state(self, run: CompiledRun, state: TrainState, *, resumed: bool) -> TrainState:
        """The state is initial or restored and on the device, or resumed and on the host. Returns
        it, or another."""
        return state

    def choose_sinks(
        self, run: CompiledRun, estimate: Estimate | None, host: HostState
    ) -> SinkPlan | None:
        """Training comes next. Returns its sinks; None leaves them to the recipe.

        `host` is the state of the host in the checkpoint of a resumed run.
        """
        return None

    def prepare(self, run: CompiledRun, sink: SinkPlan, step: int) -> CompiledRun:
        """Sinks are chosen, and `step` steps are done. Returns the run, or one with other steps or
        other programs."""
        return run

    def check(self, run: CompiledRun) -> None:
        """Callbacks are made. This is the last moment at which a run is refused without a trace."""

    @contextmanager
    def train(self, run: CompiledRun) -> Iterator[None]:
        """In the body, the run opens its logs for steps, trains and closes them."""
        yield

    @contextmanager
    def copy_checkpoints(self, evaluations: Evaluations) -> Iterator[Sequence[Copies]]:
        """In the body, every checkpoint is passed to the copies that this yields."""
        yield ()

    @property
    def monitors(self) -> Sequence[Monitor]:
        """Monitors of the events of training."""
        return ()

    @property
    def state_steps(self) -> Sequence[int]:
        """Numbers of steps done after which `see_state` is called."""
        return ()

    @property
    def state_periods(self) -> Sequence[int]:
        """Periods, in steps, at whose multiples `see_state` is called, 0 included."""
        return ()

    def see_state(self, state: TrainState, step: int) -> None:
        """The state after `step` steps, which mustn't change: one of the `state_steps`, or a
        multiple of one of the `state_periods`."""

    def advance(self, context: RunContext) -> None:
        """A resumed run, in its first process, has done its first new step."""

    def measure(self, run: CompiledRun, state: TrainState) -> Mapping[str, float]:
        """A state was evaluated. Returns metrics besides those of the evaluation."""
        return {}

    def examine(self, run: CompiledRun, state: TrainState, step: int) -> Examination | None:
        """The non-finite `step` ends training; `state` is the state before it."""
        return None

    def record(self, run: CompiledRun, history: History) -> None:
        """Training has ended, well or by an error. Adds to the summary."""

    def conclude_training(
        self, run: CompiledRun, estimate: Estimate | None, state: TrainState
    ) -> None:
        """Training has ended without an error, and its logs are complete."""

    def conclude(self, run: CompiledRun, state: TrainState) -> None:
        """All steps are done, and the final state is evaluated."""
