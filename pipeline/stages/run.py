"""A run: the stages in order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from pipeline.backends.base import Backend, Estimate, Executable
from pipeline.checkpoint.host_state import HostState
from pipeline.checkpoint.restore import FOLDER, saved_steps
from pipeline.config.compose import for_processes
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.files.folder_lock import Lock
from pipeline.core.host.environment import require_usable_environment
from pipeline.core.host.garbage import collect_seldom
from pipeline.core.host.signals import Interrupted, Signals, heard
from pipeline.core.reporter import Reporter
from pipeline.data.dataset import Dataset
from pipeline.data.text.text_format import write_tokenizer
from pipeline.engine.bad_step import BadStepError
from pipeline.engine.callbacks.callback import Callback
from pipeline.engine.callbacks.events import Pruner, SinkReport
from pipeline.engine.history import History
from pipeline.engine.loop import exhaust, train
from pipeline.engine.monitors.log_levels import log_by_level
from pipeline.engine.monitors.metrics_log import require_logs
from pipeline.stages.autosink.choose_sink import SinkPlan, choose_sink, chooses_sink
from pipeline.stages.build import Built, build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import declare_data, load_data
from pipeline.stages.estimate import estimate_cost
from pipeline.stages.launch.join import joined
from pipeline.stages.launch.local import run_locally
from pipeline.stages.launch.place import LOCAL
from pipeline.stages.learning_rates import fingerprints, read_rate_files
from pipeline.stages.lower import lower
from pipeline.stages.program_key import program_key
from pipeline.stages.record import run_directory
from pipeline.stages.record.compiled_programs import write_figures
from pipeline.stages.record.continuity import require_same_origin
from pipeline.stages.record.environment import describe_process
from pipeline.stages.record.guards import (
    oom_to_run_error,
    os_errors_to_run_errors,
    stop_on_signal,
    timed,
    write_summary,
)
from pipeline.stages.record.provenance import Provenance, add_provenance
from pipeline.stages.record.run_folder import RunFolder, open_folder
from pipeline.stages.record.summary import Summary, facts_of, new_summary, start_up, versions
from pipeline.stages.runner.context import RunContext
from pipeline.stages.runner.evaluations import Evaluations
from pipeline.stages.runner.initial_state import initial_state, read_restored
from pipeline.stages.runner.observer_settings import observer_settings
from pipeline.stages.runner.observers import Observers, open_observers
from pipeline.stages.runner.open_profile import open_profile, to_profile
from pipeline.stages.runner.open_training import (
    Extras,
    make_extras,
    open_training,
    record_overflows,
    require_ready_callbacks,
)
from pipeline.stages.runner.resume_command import HowToResume, resume_overrides
from pipeline.training.parallel.devices import context_line
from pipeline.training.parallel.launch_spec import DEFAULT_PROCESSES
from pipeline.training.parallel.ranks import Ranks
from pipeline.training.rate_table import RateFile

OpenPrograms = Callable[
    [RunContext, Recipe, Dataset, Built, Backend], tuple[Built, Built, Executable]
]
"""Gives a run its step as it is lowered, with and without the marks of a profile, and its compiled
programs."""


def run(
    recipe: Recipe,
    run_dir: Path | None = None,
    changed: Mapping[str, Any] | None = None,
    started_at: float | None = None,
    pruner: Pruner | None = None,
    signals: Signals | None = None,
    how_to_resume: HowToResume = resume_overrides,
    callbacks: Sequence[Callback] = (),
    programs: OpenPrograms | None = None,
    console: Console | None = None,
) -> Summary:
    """Run the stages that a recipe names and return the summary.

    Writes into the run that is resumed, else `run_dir`, else a new directory under `outputs/`.
    `changed` are the keys in which this run differs from others of a sweep. `started_at` is when
    the command started, by `time.perf_counter`; by default now. A `pruner` may end training at a
    boundary. `signals` let a caller see a signal that came when this run had nothing left to stop.
    A run that ends early prints `how_to_resume`. `callbacks` are called after those of the recipe.
    `programs` stands for `lower_and_compile` where several runs share a program. The run's lines go
    to `console`. Raises PipelineError when the run can't be done; summary.json says so too.
    """
    options = run_dir, changed, started_at, pruner, signals, how_to_resume, callbacks
    return exhaust(run_in_sinks(recipe, *options, programs, console))


def run_in_sinks(
    recipe: Recipe,
    run_dir: Path | None = None,
    changed: Mapping[str, Any] | None = None,
    started_at: float | None = None,
    pruner: Pruner | None = None,
    signals: Signals | None = None,
    how_to_resume: HowToResume = resume_overrides,
    callbacks: Sequence[Callback] = (),
    programs: OpenPrograms | None = None,
    console: Console | None = None,
) -> Generator[SinkReport, None, Summary]:
    """Run as `run` does, and yield the report of each sink once it has been evaluated.

    Who iterates must do so to the end, with a stop noted in `signals` where it is to end earlier.
    """
    called = time.perf_counter()
    started_at = called if started_at is None else started_at
    changed, signals = changed or {}, signals or Signals()
    require_usable_environment()
    if recipe.launch.name == "local" and LOCAL not in os.environ:
        if pruner is not None:
            raise RecipeError(["launch = local: must be none in a sweep that prunes its trials"])
        if callbacks:
            problem = "must be none with callbacks from Python; name them in train.callbacks"
            raise RecipeError([f"launch = local: {problem}"])
        return _run_in_processes(recipe, run_dir, changed, started_at, signals, how_to_resume)
    alone = recipe.launch.name == "auto" and recipe.parallel.mode == "none"
    with (
        _left_on_signal() as left,
        joined(recipe.launch, partial(facts_of, recipe), alone=alone) as ranks,
    ):
        recipe = for_processes(recipe, ranks.size)
        run_dir, resuming = _choose_directory(recipe, run_dir, ranks)
        folder = open_folder(run_dir, resuming=resuming)
        with heard(signals), _opened(recipe, folder, resuming, ranks, console) as opened:
            reporter, summary, lock = opened
            summary.time["start_s"] = called - started_at
            services = reporter, summary, changed, started_at, signals, pruner, lock, ranks
            called_back = tuple(callbacks)
            context = RunContext(recipe, folder, resuming, *services, called_back)
            left.append(summary)
            # One of several processes leaves the others, who would wait for it.
            stops = stop_on_signal(summary) if ranks.size == 1 else nullcontext()
            with _resumable(context, how_to_resume), stops:
                yield from run_stages(context, programs or lower_and_compile)
            _report_end(context)
    return left[0]


@contextmanager
def _left_on_signal() -> Iterator[list[Summary]]:
    """Let a signal that interrupts one of several processes end it in order.

    Yields a list for the summary of the run, which says that it was stopped.
    """
    left: list[Summary] = []
    try:
        yield left
    except Interrupted:
        if not left:
            raise


def _report_end(context: RunContext) -> None:
    summary, reporter = context.summary, context.reporter
    if summary.time.get("first_step_s") is not None:
        reporter.stage("time", start_up(summary.time))
    reporter.stage(summary.status, f"{summary.reason or 'all stages'}; {context.run_dir}")


def _run_in_processes(
    recipe: Recipe,
    run_dir: Path | None,
    changed: Mapping[str, Any],
    started_at: float,
    signals: Signals,
    how_to_resume: HowToResume,
) -> Summary:
    """Run in several processes on this machine, which all call `run`; return the first's summary.

    Raises the error of the process that failed first.
    """
    recipe = for_processes(recipe, recipe.launch.processes or DEFAULT_PROCESSES)
    run_dir, resuming = _choose_directory(recipe, run_dir, Ranks())
    if resuming:
        with os_errors_to_run_errors(run_dir):
            run_directory.require_own(run_dir)
    tree = recipe.whole_tree()
    tree["train"]["resume"] = str(run_dir) if resuming else None
    request = {
        "recipe": tree,
        "run_dir": str(run_dir),
        "changed": dict(changed),
        # The clock of all processes of the machine.
        "started_at": started_at,
        "parent": os.getpid(),
    }
    try:
        with heard(signals):
            summary = run_locally(recipe.launch, request, run_dir, signals)
    except BaseException:
        if saved_steps(run_dir / FOLDER):
            _say_how_to_resume(recipe, run_dir, how_to_resume, Reporter())
        raise
    if summary.status == "stopped":
        _say_how_to_resume(recipe, run_dir, how_to_resume, Reporter())
    return summary


def _choose_directory(recipe: Recipe, run_dir: Path | None, ranks: Ranks) -> tuple[Path, bool]:
    """Return the directory of the run, and whether it is resumed; the first process decides."""

    def choose() -> tuple[str, bool]:
        resumed = run_directory.to_resume(recipe)
        if resumed is not None:
            return str(resumed), True
        made = run_directory.make(run_dir) if run_dir else run_directory.create(recipe.name)
        return str(made), False

    folder, resuming = ranks.agree(choose)
    return Path(folder), resuming


@contextmanager
def _opened(
    recipe: Recipe, folder: RunFolder, resuming: bool, ranks: Ranks, console: Console | None
) -> Iterator[tuple[Reporter, Summary, Lock | None]]:
    """Open a run directory, locked against other runs, with its log and its summary.

    Only the first process does: the others report to their own output, and keep their summary.
    """
    run_dir = folder.path
    if not ranks.is_first:
        with os_errors_to_run_errors(run_dir), oom_to_run_error():
            yield Reporter(), new_summary(recipe, run_dir), None
        return
    with ExitStack() as stack:
        stack.enter_context(os_errors_to_run_errors(run_dir))
        lock = stack.enter_context(run_directory.owned(run_dir, new=not resuming))
        # A process that is killed from here on leaves no summary.
        folder.advanced.add(partial((run_dir / run_directory.SUMMARY).unlink, missing_ok=True))
        folder.advanced.add(partial(run_directory.write_recipe, run_dir, recipe))
        reporter = stack.enter_context(Reporter(run_dir, console, held=resuming))
        folder.accepted.add(reporter.write_held_lines)
        stack.enter_context(log_by_level(reporter, recipe.monitor.log_level))
        summary = stack.enter_context(write_summary(recipe, folder))
        stack.enter_context(os_errors_to_run_errors(run_dir))
        stack.enter_context(oom_to_run_error())
        reporter.stage("recipe", f"{recipe.name}, seed {recipe.seed}; writing to {run_dir}")
        if not lock.is_certain:
            reporter.warn(f"{run_dir}: has no locks, so nothing keeps other processes out of it")
        if recipe.train.resume == "auto" and not resuming:
            reporter.stage("resume", "no unfinished run of this recipe; starting a new one")
        yield reporter, summary, lock


@contextmanager
def _resumable(context: RunContext, how_to_resume: HowToResume) -> Iterator[None]:
    """Report how to resume, where the stages inside leave a run that can be resumed."""

    def has_saved() -> bool:
        # Not where training has not been reached: what was wrong then is wrong again.
        return context.summary.steps > 0 and bool(saved_steps(context.run_dir / FOLDER))

    try:
        yield
    except BadStepError as error:
        if error.advice:
            context.reporter.stage("resume", error.advice)
        elif has_saved():
            _say_how_to_resume(context.recipe, context.run_dir, how_to_resume, context.reporter)
        raise
    except BaseException:
        if has_saved():
            _say_how_to_resume(context.recipe, context.run_dir, how_to_resume, context.reporter)
        raise
    if context.summary.status == "stopped" or (context.summary.status == "failed" and has_saved()):
        _say_how_to_resume(context.recipe, context.run_dir, how_to_resume, context.reporter)


def _say_how_to_resume(
    recipe: Recipe, run_dir: Path, how_to_resume: HowToResume, reporter: Reporter
) -> None:
    said = how_to_resume(recipe, run_dir)
    if said is not None and {"train", "checkpoint"} <= set(recipe.stages):
        reporter.stage("resume", said)


def run_stages(context: RunContext, programs: OpenPrograms) -> Generator[SinkReport, None, None]:
    """Run the stages in order, and end early where `stages` names no later one.

    `programs` lowers and compiles. Yields the report of each sink.
    """
    recipe, reporter, summary = context.recipe, context.reporter, context.summary
    trains, evaluates = "train" in recipe.stages, "eval" in recipe.stages
    if trains:
        require_ready_callbacks(recipe)
    rate_files = read_rate_files(recipe.train)
    backend = open_backend(context)

    with timed(summary, "data_s"):
        dataset = declare_data(recipe, reporter) or load_data(recipe, reporter)
    context = record_data(context, dataset, backend.device, rate_files)
    if "build" not in recipe.stages:
        return

    with timed(summary, "build_s"):
        built = build(recipe, dataset, reporter)
    summary.parameters = built.parameters
    if "compile" not in recipe.stages:
        return

    if recipe.parallel.mode == "auto":
        recipe, backend = on_planned_devices(context, dataset, built)
    # Weights that can't be read are reported before anything is compiled.
    restored = read_restored(context, dataset, built) if trains or evaluates else None
    estimate = estimate_cost(recipe, dataset, built, backend, context.folder, reporter)
    if estimate is not None:
        summary.modelled = dict(estimate.summary())
        if not (trains or evaluates):
            # A run that is only priced needs no program of the processor that computes for it.
            return

    built, whole, executable = programs(context, recipe, dataset, built, backend)
    if not (trains or evaluates):
        return

    free = backend.placement.free_bytes
    state, host = initial_state(context, built, executable, restored, free)
    if trains:
        sink = sinks_of_run(context, built, executable, backend, estimate, host)
        summary.sink = sink.summary()
        built, whole = with_sink(built, sink), with_sink(whole, sink)
    profile = open_profile(context, whole, built, executable, int(state.step))
    built, executable = profile.built, profile.executable
    extras = make_extras(context, built, executable, backend) if trains else Extras()
    require_logs(context.run_dir, int(state.step), marks_of_run(context, host))
    context.folder.accepted.release()

    history = History(int(state.step))
    with observers_of_run(context, dataset, built, history, estimate, host) as observers:
        summary.logs = observers.log_flaws()
        evaluations = Evaluations(context, dataset, built, executable, observers)
        if trains:
            collect_seldom()
            evaluations.show_samples()
            evaluations.show_graph()
            with (
                profile.open(),
                open_training(context, backend, sink, evaluations, history, extras) as training,
            ):
                state = yield from train(
                    training.program, state, training.schedule, training.hooks, host, history
                )
            record_overflows(context, state)
            profile.conclude(dataset, backend, estimate, state)
        if evaluates and history.status == "done":
            check_signals(context)
            evaluations.conclude(state, history)


def lower_and_compile(
    context: RunContext,
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    *,
    keeps: bool = False,
) -> tuple[Built, Built, Executable]:
    """Lower a step and compile its programs, as `recipe` says, which may be the planned one.

    Returns the step that is compiled, the same without the marks of a profile, and the programs.
    With `keeps`, which is for a process whose code is what lies on disk, programs that such a
    process has kept are found without tracing the step.
    """
    folder, reporter = context.folder, context.reporter
    built = whole = lower(recipe, dataset, built, backend, folder, reporter, context.ranks)
    if recipe.profile.mode != "off":
        built = to_profile(context, built, backend)
    alone = context.ranks.size == 1 and recipe.profile.mode == "off"
    executable = compile_programs(
        *(recipe, dataset, built, backend, reporter),
        key=_program_key(context, recipe, whole) if keeps and alone else None,
        evaluates_later=alone and "train" in recipe.stages and recipe.parallel.mode == "none",
    )
    context.summary.time["compile_s"] = executable.report.compile_s
    folder.accepted.add(partial(write_figures, folder.path, executable.report))
    return built, whole, executable


def _program_key(context: RunContext, recipe: Recipe, built: Built) -> str | None:
    assert context.process is not None, "the only process keeps its origin"
    return program_key(asdict(context.process), recipe, built)


def on_planned_devices(
    context: RunContext, dataset: Dataset, built: Built
) -> tuple[Recipe, Backend]:
    """Return the recipe with the mesh and cuts of a plan, and its devices."""
    # Few runs need the planner, and all would wait for its import.
    from pipeline.stages.plan_devices import plan_devices

    recipe = plan_devices(context.recipe, dataset, built, context.folder, context.reporter)
    return recipe, recipe.device.open(recipe.parallel)


def open_backend(context: RunContext) -> Backend:
    """Open the recipe's devices, and report what runs on several."""
    recipe = context.recipe
    backend = recipe.device.open(recipe.parallel)
    context.summary.versions = versions(backend.describe())
    if recipe.parallel.mode != "none":
        line = context_line(recipe.parallel, recipe.train.batch_size, context.ranks)
        context.reporter.stage("parallel", line)
    return backend


def sinks_of_run(
    context: RunContext,
    built: Built,
    executable: Executable,
    backend: Backend,
    estimate: Estimate | None,
    host: HostState,
) -> SinkPlan:
    """Return the sinks of the run; several processes measure none."""
    recipe, schedule, reporter = context.recipe, built.run_schedule, context.reporter
    if chooses_sink(recipe) and context.ranks.size > 1:
        return SinkPlan(schedule.steps_per_pass, "loop", "not measured by several processes")
    return choose_sink(recipe, schedule, executable, backend, estimate, host.sink, reporter)


def observers_of_run(
    context: RunContext,
    dataset: Dataset,
    built: Built,
    history: History,
    estimate: Estimate | None,
    host: HostState,
) -> Observers:
    """Open the observers; only the first process of a run has any."""
    if not context.ranks.is_first:
        return Observers([], None)
    settings = replace(
        observer_settings(context.recipe),
        scalars=bool(context.recipe.train.callbacks or context.callbacks),
        unit=dataset.unit,
        estimate=estimate,
        lock=context.lock,
    )
    return open_observers(
        settings,
        context.run_dir,
        built.run_schedule,
        history.step,
        context.reporter,
        marks_of_run(context, host),
    )


def marks_of_run(context: RunContext, host: HostState) -> Mapping[str, Any] | None:
    """Return the marks of the logs in the checkpoint that the run goes on from, None without."""
    return host.logs if context.resuming else None


def check_signals(context: RunContext) -> None:
    """Raise Interrupted in all processes if the first one has noted a signal to stop."""
    stop = context.ranks.agree(lambda: context.signals.stop)
    if stop is not None:
        context.signals.stop = stop
        context.signals.check()


def with_sink(built: Built, sink: SinkPlan) -> Built:
    """Return the run with the length of its sinks."""
    return replace(built, run_schedule=replace(built.run_schedule, sink_steps=sink.size))


def record_data(
    context: RunContext, dataset: Dataset, device: jax.Device, rate_files: Mapping[str, RateFile]
) -> RunContext:
    """Keep in the run directory what the run is made from; a resumed run is held against it.

    Returns the context with this process. Raises RecipeError where a run to resume had other data.
    """
    if context.ranks.is_first:
        process = _origin(context, dataset, device, rate_files)
        context.folder.accepted.add(partial(add_provenance, context.run_dir, process))
        context = replace(context, process=process)
    image, text = dataset.raw_image, dataset.text
    context.summary.data = {
        "image": {"shape": list(image.shape), "dtype": image.dtype},
        "classes": list(dataset.classes),
        "targets": dataset.targets.to_dict(),
        **({} if dataset.table is None else {"table": dataset.table.to_dict()}),
        **({} if text is None else {"text": text.to_dict()}),
    }
    if context.ranks.is_first and text is not None:
        context.folder.accepted.add(partial(write_tokenizer, context.run_dir, text))
    return context


def _origin(
    context: RunContext, dataset: Dataset, device: jax.Device, rate_files: Mapping[str, RateFile]
) -> Provenance:
    """Describe this process. Raises DataError where it can't go on with the run."""
    recipe = context.recipe
    # As read: the part of it that is evaluated may change.
    splits = {"train": dataset.train, "eval": dataset.whole_eval}
    process = describe_process(recipe.seed, context.summary.versions, device, splits)
    if rate_files:
        data = {**process.data, "learning rates": fingerprints(rate_files)}
        process = replace(process, data=data)
    if context.resuming and saved_steps(context.run_dir / FOLDER):
        changed, warn = recipe.train.resume_changed, context.reporter.warn
        require_same_origin(context.run_dir, process, changed, warn)
    return process
