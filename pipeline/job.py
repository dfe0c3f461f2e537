"""A run: the six stages in order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import run_directory
from pipeline.backends.base import Backend
from pipeline.config.recipe import Recipe
from pipeline.locked_folder import Lock
from pipeline.observe.endings import (
    refused_by_path,
    short_of_memory,
    stoppable,
    summarised,
    timed,
)
from pipeline.observe.monitors import Judge
from pipeline.observe.observers import Observers, open_observers
from pipeline.observe.process import describe_process
from pipeline.observe.provenance import add_provenance
from pipeline.observe.reporter import Reporter
from pipeline.observe.summary import Summary, start_up, versions
from pipeline.prepared import Job, Prepared
from pipeline.signals import Signals, heard
from pipeline.stages.build import Built, build
from pipeline.stages.compile import compile_run
from pipeline.stages.data import Dataset, load_data, sample_images
from pipeline.stages.estimate import estimate_run
from pipeline.stages.history import History
from pipeline.stages.host_state import HostState
from pipeline.stages.lower import lower
from pipeline.stages.sinking import Sinkable, settle
from pipeline.starting_point import read_restored, starting_point
from pipeline.training.state import TrainState
from pipeline.training_run import evaluate_run, train_run

if TYPE_CHECKING:
    from pipeline.weights.restore import Restored


def run(
    recipe: Recipe,
    run_dir: Path | None = None,
    changed: Mapping[str, Any] | None = None,
    begun: float | None = None,
    judge: Judge | None = None,
    signals: Signals | None = None,
) -> Summary:
    """Carry out the stages that a recipe names, and say what became of it.

    Writes into the run that is resumed, else `run_dir`, else a new directory under `outputs/`.
    `changed` are the keys that set this run apart from others of a sweep. `begun` is when the
    command began, by `time.perf_counter`; now unless it is given. A `judge` may end training at a
    boundary. `signals` are for whoever must know of one that came when there was nothing left for
    this run to stop. Raises PipelineError when the run can't be done; summary.json says so too.
    """
    called = time.perf_counter()
    begun = called if begun is None else begun
    resumed = run_directory.to_resume(recipe)
    run_dir = resumed or _make_directory(recipe, run_dir)
    resuming, changed, signals = resumed is not None, changed or {}, signals or Signals()
    with heard(signals), _opened(recipe, run_dir, resuming) as opened:
        reporter, summary, lock = opened
        summary.time["start_s"] = called - begun
        about = recipe, run_dir, resuming, reporter, summary, changed, begun, signals, judge
        job = Job(*about, lock)
        with stoppable(summary):
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
        stack.enter_context(refused_by_path(run_dir))
        lock = stack.enter_context(run_directory.owned(run_dir, new=not resuming))
        run_directory.write_recipe(run_dir, recipe)
        reporter = stack.enter_context(Reporter(run_dir))
        summary = stack.enter_context(summarised(recipe, run_dir))
        stack.enter_context(refused_by_path(run_dir))
        stack.enter_context(short_of_memory())
        reporter.stage("recipe", f"{recipe.name}, seed {recipe.seed}; writing to {run_dir}")
        if not lock.is_certain:
            reporter.warn(f"{run_dir}: has no locks, so nothing keeps other processes out of it")
        if recipe.train.resume == "auto" and not resuming:
            reporter.stage("resume", "no unfinished run of this recipe; starting a new one")
        yield reporter, summary, lock


def _run_stages(job: Job) -> None:
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


def _load(job: Job, backend: Backend) -> Dataset:
    with timed(job.summary, "data_s"):
        dataset = load_data(job.recipe, job.reporter)
    job.summary.data = _about(dataset)
    splits = {"train": dataset.train, "eval": dataset.eval}
    about = describe_process(job.recipe.seed, job.summary.versions, backend.device, splits)
    add_provenance(job.run_dir, about)
    return dataset


def _compile(job: Job, backend: Backend, dataset: Dataset, built: Built) -> None:
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
        _use(job, Prepared(backend, dataset, built, executable, estimate), restored)


def _use(job: Job, made: Prepared, restored: Restored | None) -> None:
    """Train, checkpoint, evaluate: the stages that a compiled run is for."""
    recipe = job.recipe
    state, host = starting_point(job, made, restored)
    made = _settle(job, made, host) if "train" in recipe.stages else made
    history = History(int(state.step))
    course, reporter = made.built.course, job.reporter
    kept = host.model_dump() if history.step else {}
    about = recipe, job.run_dir, course, history.step, reporter, made.estimate, kept, job.lock
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
    image = dataset.given
    return {
        "image": {"shape": list(image.shape), "dtype": image.dtype},
        "classes": list(dataset.classes),
    }


def _settle(job: Job, made: Prepared, host: HostState) -> Prepared:
    """The run with the sinks that it will have, which may take a measurement."""
    course, executable = made.built.course, made.executable
    work = Sinkable(job.recipe, course, executable, made.backend, made.estimate)
    sink = settle(work, host.sink, job.reporter)
    job.summary.sink = sink.summary()
    built = replace(made.built, course=replace(course, sink_steps=sink.size))
    return replace(made, built=built, sink=sink)


def _evaluate(
    job: Job, made: Prepared, observers: Observers, state: TrainState, history: History
) -> None:
    """Evaluate the final state, unless training has just done so."""
    evaluation = history.evaluated.get(history.step)
    if evaluation is None:
        evaluation = evaluate_run(job, made, state)
        observers.monitor.on_eval(history.step, evaluation)
    job.summary.metrics |= evaluation.metrics
    observers.add_hparams(job.changed, evaluation)
