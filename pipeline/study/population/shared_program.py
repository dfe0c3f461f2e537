"""The program that the runs of a group share, lowered and compiled once, by whoever is first.

What differs between runs is an argument of it: the state, the order of samples, the seed, the
learning rates and the constants that vary. So each run computes what it computes alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import jax
from rich.console import Console

from pipeline.backends.base import Backend, CompileReport
from pipeline.backends.initialisation import UNOPTIMIZED
from pipeline.backends.xla import Programs, XlaExecutable
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_text
from pipeline.core.host.memory import available_bytes
from pipeline.core.host.platforms import platform_of
from pipeline.core.reporter import Reporter
from pipeline.data.dataset import Dataset
from pipeline.stages.build import Built, build
from pipeline.stages.compile import compile_given, compile_inputs, recomputing
from pipeline.stages.lower import lower
from pipeline.stages.record.guards import timed
from pipeline.stages.record.run_directory import LOWERINGS, RunFolder
from pipeline.stages.run import lower_and_compile
from pipeline.stages.runner.context import CompiledRun, RunContext
from pipeline.study.population.groups import flat, numbers_of
from pipeline.study.population.shared_step import (
    CompiledInError,
    SharedStep,
    Values,
    share_step,
)
from pipeline.training.state import StepConfig, TrainState
from pipeline.training.step import TrainStep

MAX_LOWERINGS_BYTES = 16 << 20


@dataclass(frozen=True)
class Places:
    """The number of runs that train at once; `is_asked` where the user has given it."""

    count: int
    is_asked: bool = False

    def require_room(self, each_bytes: int) -> None:
        """Raise RunError where runs of that many bytes each don't fit into memory at once."""
        available = available_bytes()
        if self.count * each_bytes <= available:
            return
        fitting = max(1, available // each_bytes)
        key = f"hydra.sweeper.vectorize = {self.count if self.is_asked else 'true'}"
        raise RunError(
            f"{key}: {self.count} runs at once would take {self.count * each_bytes / 1e9:,.1f} GB "
            f"of memory, {available / 1e9:,.1f} GB are available here; {fitting} at once fit: "
            f"hydra.sweeper.vectorize={fitting}"
        )


class OtherLoweringsError(Exception):
    """A run that is resumed was computed by other lowerings than its group."""


@dataclass(frozen=True)
class _Compiled:
    """Programs and arguments that the first run of a group has made."""

    recipe: Recipe
    parts: StepConfig
    single_steps: bool
    lowerings: str | None
    """The file of its run directory; None where the network has no choice."""
    programs: Programs
    report: CompileReport
    rates: jax.Array
    buffers: tuple[jax.Array, jax.Array]
    shared: SharedStep


@dataclass(eq=False)
class SharedProgram:
    """The program of a group of runs; `members` are the numbers of each that may vary.

    Safe from several threads: the first builds, and the others wait.
    """

    members: Sequence[Values]
    places: Places
    _lock: Lock = field(default_factory=Lock)
    _compiled: _Compiled | None = None
    refused: CompiledInError | None = None
    """Why these runs can't share a program, once that is known."""
    _inits: dict[str, Callable[..., TrainState]] = field(default_factory=dict)

    def serves(self, numbers: Values) -> bool:
        """Whether the program, where it is compiled already, is that of a run with these numbers
        too."""
        if self._compiled is None:
            return numbers in self.members
        tracer = self._compiled.shared.tracer
        changed = {key for key in numbers if numbers[key] != tracer.first.get(key)}
        return numbers.keys() == tracer.first.keys() and changed <= tracer.keys

    def open(
        self,
        context: RunContext,
        recipe: Recipe,
        dataset: Dataset,
        built: Built,
        backend: Backend,
    ) -> CompiledRun:
        """Give a run its step as it is lowered, and its share of the program.

        A run that was lowered in another way before it is resumed, or that only compiles, has
        programs of its own. Raises CompiledInError where numbers of the runs decide what is
        compiled.
        """
        if not {"train", "eval"} & set(recipe.stages):
            return lower_and_compile(context, recipe, dataset, built, backend)
        try:
            with timed(context.summary, "compile_s"):
                lowered, executable = self._open(context, dataset, built, backend)
        except OtherLoweringsError:
            line = "not as the other runs of the sweep: programs of its own"
            context.reporter.stage("lower", line)
            return lower_and_compile(context, recipe, dataset, built, backend)
        return CompiledRun(context, dataset, lowered, backend, executable)

    def _open(
        self, context: RunContext, dataset: Dataset, built: Built, backend: Backend
    ) -> tuple[Built, XlaExecutable]:
        with self._lock:
            if self.refused is not None:
                raise self.refused
            try:
                if self._compiled is None:
                    self._compiled = self._compile(context, dataset, built, backend)
                compiled = self._compiled
                lowered = _lowered(built, compiled)
                step = _step_alone(context.recipe, lowered)
                constants = compiled.shared.arguments_of(numbers_of(context.recipe), step)
            except CompiledInError as error:
                self.refused = error
                raise
            init = self._init_of(context.recipe, lowered, compiled, backend)
        _keep_lowerings(context, compiled)
        inputs = compile_inputs(context.recipe, dataset, lowered, backend, context.reporter)
        programs = Programs(init, compiled.programs.train, compiled.programs.evaluate)
        executable = XlaExecutable(
            work=replace(inputs, constants=constants),
            placement=backend.placement,
            report=CompileReport((), single_steps=compiled.report.single_steps),
            programs=programs,
            rates=compiled.rates,
            buffers=jax.tree.map(lambda array: array.copy(), compiled.buffers),
        )
        executable.set_learning_rates(inputs.learning_rates)
        return lowered, executable

    def _compile(
        self, context: RunContext, dataset: Dataset, built: Built, backend: Backend
    ) -> _Compiled:
        recipe, reporter = context.recipe, context.reporter
        # Written at once: what the group keeps of the choice is read from there below.
        folder = RunFolder(context.run_dir, ranks=context.ranks)
        lowered = lower(recipe, dataset, built, backend, folder, reporter)
        inputs = compile_inputs(recipe, dataset, lowered, backend, reporter)

        def make(varied: Recipe) -> TrainStep:
            with open(os.devnull, "w", encoding="utf-8") as nowhere:
                parts = build(varied, dataset, Reporter(None, Console(file=nowhere))).parts
            parts = replace(parts, network=lowered.parts.network)
            return _step_alone(recipe, replace(lowered, parts=parts))

        shared = share_step(recipe, self.members, make, inputs)
        constants = shared.arguments_of(numbers_of(recipe), inputs.step)
        inputs = replace(inputs, step=shared.step, constants=constants)
        executable = compile_given(inputs, recipe, backend, reporter)
        assert isinstance(executable, XlaExecutable)
        temporary = max(program.temporary_bytes for program in executable.report.programs)
        # A state, and the copy of it that a checkpoint takes.
        states = 2 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(built.state))
        feeds = inputs.train.device_bytes + inputs.eval.device_bytes
        self.places.require_room(states + temporary + feeds)
        file = context.run_dir / LOWERINGS
        kept = read_text(file, MAX_LOWERINGS_BYTES) if file.exists() else None
        inputs.train.close()
        return _Compiled(
            recipe,
            lowered.parts,
            lowered.single_steps,
            kept,
            executable.programs,
            executable.report,
            executable.rates,
            executable.buffers,
            shared,
        )

    def _init_of(
        self, recipe: Recipe, built: Built, compiled: _Compiled, backend: Backend
    ) -> Callable[..., TrainState]:
        """The program of a run's initialisation: that of the first run, where it is the same."""
        about = _initial_values(recipe, compiled.shared)
        if about == _initial_values(compiled.recipe, compiled.shared):
            return compiled.programs.init
        if about not in self._inits:
            seed = backend.placement.put(built.seed)
            options = UNOPTIMIZED if platform_of(backend.device.platform).optimizes_slowly else None
            program = jax.jit(built.step.init).lower(seed)
            self._inits[about] = program.compile(compiler_options=options)
        return self._inits[about]


def _step_alone(recipe: Recipe, built: Built) -> TrainStep:
    return (recomputing(built) if recipe.train.remat == "blocks" else built).step


def _initial_values(recipe: Recipe, shared: SharedStep) -> str:
    """The values of keys, as text, that the initial state depends on besides the seed."""
    leaves = dict(flat(recipe.model.init.model_dump(mode="json")))
    numbers: Mapping[str, Any] = {}
    if not shared.draws_alike:
        own = numbers_of(recipe)
        numbers = {key: own[key] for key in shared.tracer.keys}
    return repr((sorted(leaves.items()), sorted(numbers.items())))


def _lowered(built: Built, compiled: _Compiled) -> Built:
    """The step of a run with the layers of its group's network, and its own initialisation."""
    network, shared = built.parts.network, compiled.parts
    fields = [name for name in ("policy", "layout") if hasattr(network, name)]
    network = network.clone(**{name: getattr(shared.network, name) for name in fields})
    parts = replace(built.parts, network=network, lowerings=shared.lowerings)
    return replace(built, parts=parts, single_steps=compiled.single_steps)


def _keep_lowerings(context: RunContext, compiled: _Compiled) -> None:
    """Keep the group's lowerings in a run's directory, where a resumed run reads them."""
    file, text = context.run_dir / LOWERINGS, compiled.lowerings
    if not file.exists():
        if text is not None:
            write_whole(file, text)
    elif read_text(file, MAX_LOWERINGS_BYTES) != text:
        raise OtherLoweringsError
