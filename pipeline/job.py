"""A run: the six stages in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError

from pipeline import run_directory
from pipeline.backends.base import Backend, Estimate, Executable
from pipeline.config.recipe import Recipe
from pipeline.errors import PipelineError, RecipeError, RunError, first_line
from pipeline.host_memory import require_room
from pipeline.observe.monitors import Judge
from pipeline.observe.observers import Observers, open_observers
from pipeline.observe.process import describe_process
from pipeline.observe.provenance import add_provenance
from pipeline.observe.reporter import Reporter
from pipeline.observe.summary import Summary, start_up, versions
from pipeline.signals import Interrupted, Signals, heard
from pipeline.sink.schedule import Event
from pipeline.stages.build import Built, build
from pipeline.stages.checkpoint import Checkpoints
from pipeline.stages.compile import compile_run
from pipeline.stages.data import Dataset, load_data, sample_images
from pipeline.stages.estimate import estimate_run
from pipeline.stages.evaluate import evaluate
from pipeline.stages.lower import lower
from pipeline.stages.rollback import Rollbacks
from pipeline.stages.saved import restore_state
from pipeline.stages.sinking import Settled, Sinkable, settle
from pipeline.stages.train import History, Training, event_periods, train
from pipeline.training.bad_steps import Rollback
from pipeline.training.parameters import restart_average
from pipeline.training.state import TrainState

if TYPE_CHECKING:
    from pipeline.weights.restore import Restored


def run(
    recipe: Recipe,
    run_dir: Path | None = None,
    changed: Mapping[str, Any] | None = None,
    begun: float | None = None,
    judge: Judge | None = None,
) -> Summary:
    """Carry out the stages that a recipe names, and say what became of it.

    Writes into the run that is resumed, else `run_dir`, else a new directory under `outputs/`.
    `changed` are the keys that set this run apart from others of a sweep. `begun` is when the
    command began, by `time.perf_counter`; now unless it is given. A `judge` may end training at a
    boundary. Raises PipelineError when the run can't be done; summary.json says so too.
    """
    called = time.perf_counter()
    begun = called if begun is None else begun
    resumed = run_directory.to_resume(recipe)
    if resumed is not None:
        run_dir = resumed
    else:
        run_dir = run_directory.make(run_dir) if run_dir else run_directory.create(recipe.name)
    signals = Signals()
    with ExitStack() as stack:
        stack.enter_context(heard(signals))
        stack.enter_context(_refused_by_path(run_dir))
        locked = stack.enter_context(run_directory.owned(run_dir, new=resumed is None))
        run_directory.write_recipe(run_dir, recipe)
        reporter = stack.enter_context(Reporter(run_dir))
        summary = stack.enter_context(_summary(recipe, run_dir))
        stack.enter_context(_refused_by_path(run_dir))
        stack.enter_context(_short_of_memory())
        reporter.stage("recipe", f"{recipe.name}, seed {recipe.seed}; writing to {run_dir}")
        if not locked:
            reporter.warn(f"{run_dir}: has no locks, so nothing keeps other processes out of it")
        if recipe.train.resume == "auto" and resumed is None:
            reporter.stage("resume", "no unfinished run of this recipe; starting a new one")
        summary.time["start_s"] = called - begun
        resuming, changed = resumed is not None, changed or {}
        with _stoppable(summary):
            _run_stages(
                Job(recipe, run_dir, resuming, reporter, summary, changed, begun, signals, judge)
            )
        if summary.time.get("first_step_s") is not None:
            reporter.stage("time", start_up(summary.time))
        reporter.stage(summary.status, f"{summary.reason or 'all stages'}; {run_dir}")
    return summary


@contextmanager
def _refused_by_path(run_dir: Path) -> Iterator[None]:
    """Around a run: what the system refuses, as a full disk does, is told by its path."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.filename or run_dir}: {error.strerror or error}") from error


@contextmanager
def _short_of_memory() -> Iterator[None]:
    """Around a run: sizes that this machine has no memory for are told in one line."""
    try:
        yield
    except MemoryError as error:
        raise RunError(f"out of memory: {first_line(error)}") from error
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(f"out of memory: {first_line(error)}") from error


@contextmanager
def _summary(recipe: Recipe, run_dir: Path) -> Iterator[Summary]:
    """The summary of a run, written whatever happens to it, short of being killed.

    That of the run that is resumed goes first: should this one be killed, it is not done.
    """
    (run_dir / run_directory.SUMMARY).unlink(missing_ok=True)
    summary = Summary(recipe.name, recipe.device.name, recipe.seed, recipe.stages, str(run_dir))
    begun = time.perf_counter()
    try:
        yield summary
    except BaseException as error:
        # An exit that was asked for, by a signal or by a scheduler, is no failure.
        summary.status = "failed" if isinstance(error, Exception) else "stopped"
        summary.reason = str(error) or type(error).__name__
        summary.exit_status = error.exit_status if isinstance(error, PipelineError) else 1
        raise
    finally:
        summary.time["total_s"] = time.perf_counter() - begun
        # Where a run has failed and its summary can't be written, the first failure says more.
        with suppress(OSError) if summary.status == "failed" else nullcontext():
            summary.write(run_dir)


@contextmanager
def _stoppable(summary: Summary) -> Iterator[None]:
    """Around the stages: a signal that interrupts them ends the run as stopped."""
    try:
        yield
    except Interrupted as signal:
        summary.status, summary.reason, summary.exit_status = "stopped", str(signal), 1


@contextmanager
def _timed(summary: Summary, name: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    summary.time[name] = time.perf_counter() - begun


@dataclass(frozen=True)
class Job:
    """What one run is about, beside what its stages make."""

    recipe: Recipe
    run_dir: Path
    resuming: bool
    reporter: Reporter
    summary: Summary
    changed: Mapping[str, Any]
    begun: float
    """When the command began, by `time.perf_counter`."""
    signals: Signals
    judge: Judge | None = None


@dataclass(frozen=True)
class Prepared:
    """What the first three stages made; `estimate` on emulated devices, `sink` for training."""

    backend: Backend
    dataset: Dataset
    built: Built
    executable: Executable
    estimate: Estimate | None
    sink: Settled | None = None


def _run_stages(job: Job) -> None:
    """The stages as plain calls. `stages` may end early, or leave out training."""
    recipe, reporter, summary = job.recipe, job.reporter, job.summary
    backend = recipe.device.open()
    summary.versions = versions(backend.describe())

    with _timed(summary, "data_s"):
        dataset = load_data(recipe, reporter)
    summary.data = _about(dataset)
    splits = {"train": dataset.train, "eval": dataset.eval}
    process = describe_process(recipe.seed, summary.versions, backend.device, splits)
    add_provenance(job.run_dir, process)
    if "build" not in recipe.stages:
        return
    with _timed(summary, "build_s"):
        built = build(recipe, dataset, reporter)
    summary.parameters = built.parameters
    if "compile" not in recipe.stages:
        return
    estimate = estimate_run(recipe, dataset, built, backend, job.run_dir, reporter)
    runs = bool({"train", "eval"} & set(recipe.stages))
    if estimate is not None:
        summary.modelled = dict(estimate.summary())
        if not runs:
            # What is only priced needs no program of the processor that computes in its place.
            return
    built = lower(recipe, dataset, built, backend, job.run_dir, reporter)
    executable = compile_run(recipe, dataset, built, backend, reporter)
    summary.time["compile_s"] = executable.report.compile_s
    if runs:
        _use(job, Prepared(backend, dataset, built, executable, estimate))


def _use(job: Job, made: Prepared) -> None:
    """Train, checkpoint, evaluate: the stages that a compiled run is for."""
    recipe = job.recipe
    state, host = _starting_point(job, made)
    made = _settle(job, made, host) if "train" in recipe.stages else made
    history = History(int(state.step))
    course, reporter = made.built.course, job.reporter
    first, estimate = history.step, made.estimate
    with open_observers(recipe, job.run_dir, course, first, reporter, estimate) as observers:
        if "train" in recipe.stages:
            observers.show_samples(sample_images(recipe, made.dataset))
            state = _train(job, made, observers, state, host, history)
        if "eval" in recipe.stages and history.status == "done":
            job.signals.check()
            _evaluate(job, made, observers, state, history)


def _starting_point(job: Job, made: Prepared) -> tuple[TrainState, Mapping[str, Any]]:
    """Fresh weights, those of `checkpoint.restore`, or everything a killed run had saved.

    Raises RecipeError when the run to resume is longer already, and RunError where weights and
    optimizer have no room.
    """
    if job.recipe.device.name != "gpu":
        leaves = jax.tree.leaves(made.built.state)
        size_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        try:
            require_room(size_bytes, f"the weights and the optimizer of {job.recipe.model.name}")
        except ValueError as error:
            raise RunError(str(error)) from error
    state, source = made.executable.init(), job.recipe.checkpoint.restore
    host: Mapping[str, Any] = {}
    if source is not None:
        restored = _restore(job, made, state)
        state = replace(
            restored.state, average=restart_average(state.average, restored.state.params)
        )
        if "train" not in job.recipe.stages and restored.step is not None:
            state = replace(state, step=jnp.asarray(restored.step, jnp.int32))
        job.reporter.stage("restore", restored.line)
    elif job.resuming:
        tree = job.recipe.model_dump(mode="json")
        found = restore_state(job.run_dir, state, tree, job.reporter.warn)
        state, host = found or (state, host)
        step, total = int(state.step), made.built.course.total
        if step > total:
            raise RecipeError([f"train: {total} steps in all, and {job.run_dir} has done {step}"])
        job.summary.resumed_from = {"run": str(job.run_dir), "step": step}
        job.reporter.stage("resume", f"{job.run_dir} from step {step}")
    return made.executable.put(state), host


def _about(dataset: Dataset) -> dict[str, Any]:
    """What whoever uses the trained network must know of the data, in the summary."""
    image = dataset.given
    return {
        "image": {"shape": list(image.shape), "dtype": image.dtype},
        "classes": list(dataset.classes),
    }


def _restore(job: Job, made: Prepared, state: TrainState) -> Restored:
    """The state with the weights that `checkpoint.restore` names."""
    # Few runs start from weights, and all would wait for what reads them to be imported.
    from pipeline.weights.network import arrays_of_model
    from pipeline.weights.restore import restore

    recipe, dataset = job.recipe, made.dataset
    network = partial(arrays_of_model, recipe.model, len(dataset.classes), dataset.image)
    return restore(recipe, state, network, job.reporter.warn)


def _settle(job: Job, made: Prepared, host: Mapping[str, Any]) -> Prepared:
    """The run with the sinks that it will have, which may take a measurement."""
    course, executable = made.built.course, made.executable
    work = Sinkable(job.recipe, course, executable, made.backend, made.estimate)
    sink = settle(work, host, job.reporter)
    job.summary.sink = sink.summary()
    built = replace(made.built, course=replace(course, sink_steps=sink.size))
    return replace(made, built=built, sink=sink)


def _train(
    job: Job,
    made: Prepared,
    observers: Observers,
    state: TrainState,
    host: Mapping[str, Any],
    history: History,
) -> TrainState:
    """Train, saving at every event that the recipe names, and at the end."""
    recipe, sink = job.recipe, made.sink
    assert sink is not None, "settled before training"
    if not recipe.train.sink and recipe.train.sink_size != -1:
        job.reporter.warn(f"train.sink_size = {recipe.train.sink_size}: ignored, sink is false")
    # What is being written when training ends is on disk before a first signal is answered.
    with job.signals.held(), ExitStack() as stack:
        checkpoints = rollbacks = None
        if "checkpoint" in recipe.stages:
            tree = recipe.model_dump(mode="json")
            policy = recipe.train.on_nan
            periods = event_periods(recipe, made.built.course.steps_per_pass)[Event.CHECKPOINT]
            held = periods if isinstance(policy, Rollback) else ()
            checkpoints = stack.enter_context(
                Checkpoints(job.run_dir, recipe.checkpoint, tree, held)
            )
            if isinstance(policy, Rollback):
                rollbacks = Rollbacks(policy, periods, checkpoints.steps, checkpoints.read)
        training = Training(
            recipe,
            made.built.course,
            made.executable,
            sink.mechanism,
            [observers.monitor, *([job.judge] if job.judge else [])],
            lambda state: evaluate(made.executable, state, made.dataset),
            checkpoints,
            sink.kept,
            job.signals,
            judge=job.judge,
            rollbacks=rollbacks,
            examine=_examination(job, made),
        )
        stack.callback(made.executable.feed.close)
        stack.callback(_take_note, job, history, training)
        state = train(training, state, host, history)
    _take_note_of_overflows(job, state)
    return state


def _examination(job: Job, made: Prepared) -> Callable[[TrainState, int], None]:
    """What looks into a step that ends the run."""

    def examine(state: TrainState, bad: int) -> None:
        # Few runs need it, and all would wait for it to be imported.
        from pipeline.autopsy.run import Examination

        parts, device = made.built.parts, made.backend.device
        Examination(job.run_dir, parts, made.executable, device, job.reporter)(state, bad)

    return examine


def _take_note_of_overflows(job: Job, state: TrainState) -> None:
    """The loss scale that training ended with, and the updates that it skipped."""
    scale = float(state.loss_scale)
    skipped = 0 if state.overflows is None else int(state.overflows.skipped_steps)
    job.summary.loss_scale = {"final": scale, "skipped_steps": skipped}
    if state.overflows is not None:
        job.reporter.stage("loss scale", f"{scale:,g} at the end; {skipped:,} updates skipped")


def _take_note(job: Job, history: History, training: Training) -> None:
    """What training leaves in the summary."""
    summary, first_step_at = job.summary, history.first_step_at
    step_ms, batch_size = history.step_ms, training.recipe.train.batch_size
    summary.status, summary.reason = history.status, history.reason
    summary.exit_status = 0 if history.status in ("done", "pruned") else 1
    summary.steps = history.step
    summary.passes = history.step / training.course.steps_per_pass
    summary.sinks = training.course.place(max(1, history.step)).sink
    summary.metrics["train_loss"] = history.loss
    rollbacks = training.rollbacks.done if training.rollbacks is not None else []
    summary.bad_steps = {
        "policy": training.recipe.train.on_nan.name,
        "left_out": history.left_out,
        "rollbacks": [asdict(gone) for gone in rollbacks],
    }
    summary.feed = asdict(training.executable.feed.report())
    summary.time |= {
        "first_dispatch_s": history.first_dispatch_s,
        "first_step_s": None if first_step_at is None else first_step_at - job.begun,
        "train_s": history.train_s,
        "step_ms": step_ms,
        "images_per_s": 1000 * batch_size / step_ms if step_ms else None,
    }


def _evaluate(
    job: Job, made: Prepared, observers: Observers, state: TrainState, history: History
) -> None:
    """Evaluate the final state, unless training has just done so."""
    evaluation = history.evaluated.get(history.step)
    if evaluation is None:
        evaluation = evaluate(made.executable, state, made.dataset)
        observers.monitor.on_eval(history.step, evaluation)
    job.summary.metrics |= evaluation.metrics
    observers.add_hparams(job.changed, evaluation)
