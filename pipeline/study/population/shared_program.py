"""Program that the runs of a group share; the first run lowers and compiles it.

The differences between runs are its arguments: the state, the order of samples, the seed, the
learning rates and the constants that vary. So a run has the same results as without the group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import jax
from rich.console import Console

from pipeline.backends.base import Backend, CompileInputs, CompileReport
from pipeline.backends.initialisation import UNOPTIMIZED
from pipeline.backends.xla import Programs, XlaExecutable, pad_to_block
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_text
from pipeline.core.host.memory import read_available_bytes
from pipeline.core.host.platforms import get_platform
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.stages.build import Built, build
from pipeline.stages.compile import compile_to_executable, make_compile_inputs, recompute_blocks
from pipeline.stages.lower import lower
from pipeline.stages.record.run_directory import LOWERINGS, RunFolder
from pipeline.stages.runner.context import BuiltRun, CompiledRun, RunContext
from pipeline.stages.runner.open_run import record_time
from pipeline.stages.runner.programs import lower_and_compile
from pipeline.study.population.groups import collect_numbers, flatten_tree
from pipeline.study.population.shared_step import CompiledInError, SharedStep, Values, share_step
from pipeline.training.state import TrainState
from pipeline.training.step import TrainStep

MAX_LOWERINGS_BYTES = 16 << 20


@dataclass(frozen=True)
class Places:
    """The number of runs that train at once."""

    count: int
    is_set_by_user: bool = False
    """Whether the user has set `count`, by `hydra.sweeper.vectorize`."""

    def require_room(self, run_bytes: int) -> None:
        """Raise RunError if runs that need `run_bytes` each don't fit into memory at once."""
        available = read_available_bytes()
        if self.count * run_bytes <= available:
            return
        max_count = available // run_bytes
        advice = f"hydra.sweeper.vectorize={max_count} fits"
        if not max_count:
            advice = f"one needs {run_bytes / 1e9:,.1f} GB, so none fits; reduce train.batch_size"
        key = f"hydra.sweeper.vectorize = {self.count if self.is_set_by_user else 'true'}"
        raise RunError(
            f"{key}: {self.count} runs at once need {self.count * run_bytes / 1e9:,.1f} GB of "
            f"memory, and {available / 1e9:,.1f} GB are available; {advice}"
        )


@dataclass(frozen=True)
class _Compiled:
    """Programs and arguments from the first run of a group."""

    recipe: Recipe
    lowered: Built
    lowerings: str | None
    """Content of the first run's file of lowerings; None without a file."""
    programs: Programs
    report: CompileReport
    rates: jax.Array
    buffers: tuple[jax.Array, jax.Array]
    shared: SharedStep
    data_shapes: Sequence[Any]
    """As `_list_data_shapes` returns them."""


@dataclass(eq=False)
class SharedProgram:
    """The program of a group of runs.

    Several threads may use it: the first compiles the program, and the others wait.
    """

    members: Sequence[Values]
    """The numbers of each run that may vary."""
    places: Places
    _lock: Lock = field(default_factory=Lock)
    _compiled: _Compiled | None = None
    refused: CompiledInError | None = None
    """Error that shows that these runs can't share a program; None until it occurs."""
    _inits: dict[str, Callable[..., TrainState]] = field(default_factory=dict)

    def serves(self, numbers: Values) -> bool:
        """Return whether a run with these numbers can use the program."""
        if self._compiled is None:
            return numbers in self.members
        tracer = self._compiled.shared.tracer
        changed = {key for key in numbers if numbers[key] != tracer.first.get(key)}
        return numbers.keys() == tracer.first.keys() and changed <= tracer.keys

    def open(self, built_run: BuiltRun) -> CompiledRun:
        """Return a run with its lowered step and the shared program.

        A run gets separate programs if it only compiles, if it is resumed with other lowerings, or
        if it is an unpadded fold of another size. Raises CompiledInError if numbers decide what is
        compiled.
        """
        context = built_run.context
        dataset = built_run.dataset
        backend = built_run.backend
        if not {"train", "eval"} & set(built_run.recipe.stages):
            return lower_and_compile(built_run)
        with record_time(context.summary, "compile_s"):
            opened = self._open_programs(context, dataset, built_run.built, backend)
        if opened is None:
            line = "other lowerings or sizes than the other runs, so separate programs"
            context.reporter.print_stage("lower", line)
            return lower_and_compile(built_run)
        lowered, executable = opened
        return CompiledRun(context, dataset, lowered, backend, executable)

    def _open_programs(
        self, context: RunContext, dataset: Dataset, built: Built, backend: Backend
    ) -> tuple[Built, XlaExecutable] | None:
        """Return a run's lowered step and its programs; None if it has other lowerings or sizes."""
        with self._lock:
            if self.refused is not None:
                raise self.refused
            try:
                if self._compiled is None:
                    self._compiled = self._compile_programs(context, dataset, built, backend)
                compiled = self._compiled
                lowered = _apply_lowerings(built, compiled.lowered)
                step = _make_single_step(context.recipe, lowered)
                constants = compiled.shared.list_arguments(collect_numbers(context.recipe), step)
            except CompiledInError as error:
                self.refused = error
                raise
            init = self._get_init(context.recipe, lowered, compiled, backend)
        file = context.run_dir / LOWERINGS
        if file.exists():
            if read_text(file, MAX_LOWERINGS_BYTES) != compiled.lowerings:
                return None
        elif compiled.lowerings is not None:
            # The run reads them there when it is resumed.
            write_whole(file, compiled.lowerings)
        inputs = make_compile_inputs(context.recipe, dataset, lowered, backend, context.reporter)
        if _list_data_shapes(inputs, dataset) != compiled.data_shapes:
            inputs.train.close()
            return None
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

    def _compile_programs(
        self, context: RunContext, dataset: Dataset, built: Built, backend: Backend
    ) -> _Compiled:
        """Lower the first run, and compile the program of all.

        Raises RunError if the memory is too small for the runs that train at once.
        """
        recipe = context.recipe
        reporter = context.reporter
        # The group's lowerings are written into the run directory and read from there below.
        folder = RunFolder(context.run_dir, ranks=context.ranks)
        lowered = lower(recipe, dataset, built, backend, folder, reporter)
        inputs = make_compile_inputs(recipe, dataset, lowered, backend, reporter)

        def make_step(varied: Recipe) -> TrainStep:
            with open(os.devnull, "w", encoding="utf-8") as null_file:
                varied_built = build(varied, dataset, Reporter(None, Console(file=null_file)))
            network = lowered.step_config.network
            step_config = replace(varied_built.step_config, network=network)
            return _make_single_step(recipe, replace(lowered, step_config=step_config))

        with closing(inputs.train):
            shared = share_step(recipe, self.members, make_step, inputs)
            constants = shared.list_arguments(collect_numbers(recipe), inputs.step)
            inputs = replace(inputs, step=shared.step, constants=constants)
            executable = compile_to_executable(inputs, recipe, backend, reporter)
            assert type(executable) is XlaExecutable
            programs = executable.report.programs
            temporary_bytes = max(program.temporary_bytes for program in programs)
            # Each run has a state, and a copy for checkpoints.
            leaves = jax.tree.leaves(built.state)
            state_bytes = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
            data_bytes = inputs.train.device_bytes + inputs.eval.device_bytes
            self.places.require_room(state_bytes + temporary_bytes + data_bytes)
        file = context.run_dir / LOWERINGS
        lowerings = read_text(file, MAX_LOWERINGS_BYTES) if file.exists() else None
        return _Compiled(
            recipe=recipe,
            lowered=lowered,
            lowerings=lowerings,
            programs=executable.programs,
            report=executable.report,
            rates=executable.rates,
            buffers=executable.buffers,
            shared=shared,
            data_shapes=_list_data_shapes(inputs, dataset),
        )

    def _get_init(
        self, recipe: Recipe, built: Built, compiled: _Compiled, backend: Backend
    ) -> Callable[..., TrainState]:
        """Return the program that initializes a run: the first run's, if it would be equal."""
        values = _list_initial_values(recipe, compiled.shared)
        if values == _list_initial_values(compiled.recipe, compiled.shared):
            return compiled.programs.init
        if values not in self._inits:
            seed = backend.placement.put(built.seed)
            is_slow = get_platform(backend.device.platform).optimizes_slowly
            options = UNOPTIMIZED if is_slow else None
            lowered = jax.jit(built.step.init).lower(seed)
            self._inits[values] = lowered.compile(compiler_options=options)
        return self._inits[values]


def _list_data_shapes(inputs: CompileInputs, dataset: Dataset) -> Sequence[Any]:
    """Return the sizes of data for which a run's program is compiled, to compare them."""
    shapes: list[Any] = [pad_to_block(inputs.learning_rates).shape]
    for loader, split in ((inputs.train, dataset.train), (inputs.eval, dataset.eval)):
        # Only a resident split is an argument of the program as a whole.
        num_samples = len(split) + split.padding if loader.kind == "resident" else 0
        shapes.append((loader.kind, split.specs(), num_samples))
    orders = (dataset.train_order, dataset.eval_order)
    return [*shapes, *(order.batches(0, 1).samples for order in orders)]


def _make_single_step(recipe: Recipe, built: Built) -> TrainStep:
    """Return the step of one run, which recomputes blocks if `train.remat` is `blocks`."""
    if recipe.train.remat == "blocks":
        built = recompute_blocks(built)
    return built.step


def _list_initial_values(recipe: Recipe, shared: SharedStep) -> str:
    """Return the values on which the initial state depends besides the seed, as text."""
    leaves = dict(flatten_tree(recipe.model.init.model_dump(mode="json")))
    numbers: Mapping[str, Any] = {}
    if not shared.has_same_init:
        all_numbers = collect_numbers(recipe)
        numbers = {key: all_numbers[key] for key in shared.tracer.keys}
    return repr((sorted(leaves.items()), sorted(numbers.items())))


def _apply_lowerings(built: Built, first: Built) -> Built:
    """Return the step of a run with its initialization and the lowerings of the group's first."""
    network = built.step_config.network
    first_config = first.step_config
    fields = [name for name in ("policy", "layout") if hasattr(network, name)]
    network = network.clone(**{name: getattr(first_config.network, name) for name in fields})
    step_config = replace(built.step_config, network=network, lowerings=first_config.lowerings)
    return replace(built, step_config=step_config, single_steps=first.single_steps)
