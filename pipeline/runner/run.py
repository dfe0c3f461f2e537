"""A run: the six stages in order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.autosink.choose_sink import Sinkable, choose_sink
from pipeline.backends.base import Backend
from pipeline.config.recipe import Recipe
from pipeline.data.dataset import Dataset
from pipeline.files.folder_lock import Lock
from pipeline.host.signals import Signals, heard
from pipeline.observe.monitors import Pruner
from pipeline.observe.observers import Observers, open_observers
from pipeline.observe.reporter import Reporter
from pipeline.runner.context import CompiledRun, RunContext
from pipeline.runner.initial_state import initial_state, read_restored
from pipeline.runner.record import run_directory
from pipeline.runner.record.continuity import require_same_origin
from pipeline.runner.record.environment import describe_process
from pipeline.runner.record.guards import (
    oom_to_run_error,
    os_errors_to_run_errors,
    stop_on_signal,
    timed,
    write_summary,
)
from pipeline.runner.record.provenance import add_provenance
from pipeline.runner.record.summary import Summary, start_up, versions
from pipeline.runner.resume_command import HowToResume, resume_overrides
from pipeline.runner.training import evaluate_run, train_run
from pipeline.stages.build import Built, build
from pipeline.stages.checkpoint.host_state import HostState
from pipeline.stages.checkpoint.restore import FOLDER, saved_steps
from pipeline.stages.compile import compile_run
from pipeline.stages.data import load_data, sample_images
from pipeline.stages.estimate import estimate_run
from pipeline.stages.lower import lower
from pipeline.stages.train.history import History
from pipeline.training.state import TrainState

if TYPE_CHECKING:
    from pipeline.weights.restore import Restored


def run(
    recipe: Recipe,
    run_dir: Path | None = None,
    changed: Mapping[str, Any] | None = None,
    begun: float | None = None,
    pruner: Pruner | None = None,
    signals: Signals | None = None,
    how_to_resume: HowToResume = resume_overrides,
) -> Summary:
    """Carry out the stages that a recipe names, and say what became of it.

    Writes into the run that is resumed, else `run_dir`, else a new directory under `outputs/`.
    `changed` are the keys that set this run apart from others of a sweep. `begun` is when the
    command began, by `time.perf_counter`; now unless it is given. A `pruner` may end training at a
    boundary. `signals` are for whoever must know of one that came when there was nothing left for
    this run to stop. A run that ends early says `how_to_resume`. Raises PipelineError when the run
    can't be done; summary.json says so too.
    """
    called = time.perf_counter()
    begun = called if begun is None else begun
    resumed = run_directory.to_resume(recipe)
    run_dir = resumed or _make_directory(recipe, run_dir)
    resuming, changed, signals = resumed is not None, changed or {}, signals or Signals()
    with heard(signals), _opened(recipe, run_dir, resuming) as opened:
        reporter, summary, lock = opened
        summary.time["start_s"] = called - begun
        about = recipe, run_dir, resuming, reporter, summary, changed, begun, signals, pruner
        job = RunContext(*about, lock)
        with _resumable(job, how_to_resume), stop_on_signal(summary):
            _run_stages(job)
        if summary.time.get("first_step_s") is not None:
            reporter.stage("time", start_up(summary.time))
        reporter.stage(summary.status, f"{summary.reason or 'all stages'}; {run_dir}")
    return summary


def _make_directory(recipe: Recipe, run_dir: Path | None) -> Path:
    return run_directory.make(run_dir) if run_dir else run_directory.create(recipe.name)


@contextmanager
def _opened(
    recipe: Recipe, run_dir: Path, resuming: bool
) -> Iterator[tuple[Reporter, Summary, Lock]]:
    """A run directory that nobody else writes to meanwhile, with its log and its summary."""
    with ExitStack() as stack:
        stack.enter_context(os_errors_to_run_errors(run_dir))
        lock = stack.enter_context(run_directory.owned(run_dir, new=not resuming))
        run_directory.write_recipe(run_dir, recipe)
        reporter = stack.enter_context(Reporter(run_dir))
        summary = stack.enter_context(write_summary(recipe, run_dir))
        stack.enter_context(os_errors_to_run_errors(run_dir))
        stack.enter_context(oom_to_run_error())
        reporter.stage("recipe", f"{recipe.name}, seed {recipe.seed}; writing to {run_dir}")
        if not lock.is_certain:
            reporter.warn(f"{run_dir}: has no locks, so nothing keeps other processes out of it")
        if recipe.train.resume == "auto" and not resuming:
            reporter.stage("resume", "no unfinished run of this recipe; starting a new one")
        yield reporter, summary, lock


@contextmanager
def _resumable(job: RunContext, how_to_resume: HowToResume) -> Iterator[None]:
    """Around the stages: where they leave a run that can be gone on with, say how."""

    def say() -> None:
        said = how_to_resume(job.recipe, job.run_dir)
        if said is not None and {"train", "checkpoint"} <= set(job.recipe.stages):
            job.reporter.stage("resume", said)

    def has_saved() -> bool:
        # Not where training has not been reached: what was wrong then is wrong again.
        return job.summary.steps > 0 and bool(saved_steps(job.run_dir / FOLDER))

    try:
        yield
    except BaseException:
        if has_saved():
            say()
        raise
    if job.summary.status == "stopped" or (job.summary.status == "failed" and has_saved()):
        say()


def _run_stages(job: RunContext) -> None:
    """The stages as plain calls. `stages` may end early, or leave out training."""
    recipe, reporter, summary = job.recipe, job.reporter, job.summary
    backend = recipe.device.open()
    summary.versions = versions(backend.describe())

    dataset = _load(job, backend)
    if "build" not in recipe.stages:
        return
    with timed(summary, "build_s"):
        built = build(recipe, dataset, reporter)
    summary.parameters = built.parameters
    if "compile" in recipe.stages:
        _compile(job, backend, dataset, built)


def _load(job: RunContext, backend: Backend) -> Dataset:
    with timed(job.summary, "data_s"):
        dataset = load_data(job.recipe, job.reporter)
    job.summary.data = _about(dataset)
    # As read: what of it is evaluated may change.
    splits = {"train": dataset.train, "eval": dataset.whole_eval}
    about = describe_process(job.recipe.seed, job.summary.versions, backend.device, splits)
    if job.resuming and saved_steps(job.run_dir / FOLDER):
        require_same_origin(job.run_dir, about, job.recipe.train.resume_changed, job.reporter.warn)
    add_provenance(job.run_dir, about)
    return dataset


def _compile(job: RunContext, backend: Backend, dataset: Dataset, built: Built) -> None:
    """Price and compile, and use what was compiled where a stage wants it."""
    recipe, reporter, summary = job.recipe, job.reporter, job.summary
    runs = bool({"train", "eval"} & set(recipe.stages))
    restored = read_restored(job, dataset, built) if runs else None
    estimate = estimate_run(recipe, dataset, built, backend, job.run_dir, reporter)
    if estimate is not None:
        summary.modelled = dict(estimate.summary())
        if not runs:
            # What is only priced needs no program of the processor that computes in its place.
            return
    built = lower(recipe, dataset, built, backend, job.run_dir, reporter)
    executable = compile_run(recipe, dataset, built, backend, reporter)
    summary.time["compile_s"] = executable.report.compile_s
    if runs:
        _use(job, CompiledRun(backend, dataset, built, executable, estimate), restored)


def _use(job: RunContext, made: CompiledRun, restored: Restored | None) -> None:
    """Train, checkpoint, evaluate: the stages that a compiled run is for."""
    recipe = job.recipe
    state, host = initial_state(job, made, restored)
    made = _settle(job, made, host) if "train" in recipe.stages else made
    history = History(int(state.step))
    run_schedule, reporter = made.built.run_schedule, job.reporter
    logs = host.logs if job.resuming else None
    about = recipe, job.run_dir, run_schedule, history.step, reporter, made.estimate, logs, job.lock
    with open_observers(*about) as observers:
        job.summary.logs = observers.log_flaws()
        if "train" in recipe.stages:
            observers.show_samples(sample_images(recipe, made.dataset))
            state = train_run(job, made, observers, state, host, history)
        if "eval" in recipe.stages and history.status == "done":
            job.signals.check()
            _evaluate(job, made, observers, state, history)


def _about(dataset: Dataset) -> dict[str, Any]:
    """What whoever uses the trained network must know of the data, in the summary."""
    image = dataset.raw_image
    return {
        "image": {"shape": list(image.shape), "dtype": image.dtype},
        "classes": list(dataset.classes),
    }


def _settle(job: RunContext, made: CompiledRun, host: HostState) -> CompiledRun:
    """The run with the sinks that it will have, which may take a measurement."""
    run_schedule, executable = made.built.run_schedule, made.executable
    work = Sinkable(job.recipe, run_schedule, executable, made.backend, made.estimate)
    sink = choose_sink(work, host.sink, job.reporter)
    job.summary.sink = sink.summary()
    built = replace(made.built, run_schedule=replace(run_schedule, sink_steps=sink.size))
    return replace(made, built=built, sink=sink)


def _evaluate(
    job: RunContext, made: CompiledRun, observers: Observers, state: TrainState, history: History
) -> None:
    """Evaluate the final state, unless training has just done so."""
    evaluation = history.evaluated.get(history.step)
    if evaluation is None:
        evaluation = evaluate_run(job, made, state)
        observers.monitor.on_eval(history.step, evaluation)
    job.summary.metrics |= evaluation.metrics
    observers.add_hparams(job.changed, evaluation)
