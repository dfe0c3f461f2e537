"""Opening of a run: its directory, processes, log and summary, the lines at its end, and context
managers that convert errors and write the summary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from pipeline.backends.base import Backend
from pipeline.checkpoint.checkpoint_folder import FOLDER, list_saved_steps
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError, first_line, get_exit_status, get_status_after
from pipeline.core.host.array_values import convert_value_reads
from pipeline.core.host.launchers import record_group
from pipeline.core.host.signals import Interrupted, conclude, end_with, handle_signals
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.engine.history import NonFiniteStepError
from pipeline.engine.monitors.log_lines import log_by_level
from pipeline.stages.record import recorded_recipe, run_directory
from pipeline.stages.record.provenance import add_provenance, describe_process
from pipeline.stages.record.recorded_recipe import describe_comparison, find_reference
from pipeline.stages.record.run_directory import RECIPE, HeldWrites, RunFolder, read_outcome
from pipeline.stages.record.summary import Summary, describe_start_up, list_versions
from pipeline.stages.runner.context import RunContext, RunOptions
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.stages.runner.run_features import RunFeatures
from pipeline.training.parallel.ranks import Ranks


@contextmanager
def convert_os_errors(run_dir: Path) -> Iterator[None]:
    """Turn an OSError, such as a full disk's, into a RunError that names the path."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.filename or run_dir}: {error.strerror or error}") from error


@contextmanager
def convert_out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error of the host or the device into a RunError of one line."""
    try:
        yield
    except (MemoryError, JaxRuntimeError) as error:
        if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(
            f"out of memory: {first_line(error)}; train.memory=auto or train.accumulate_steps "
            "computes fewer samples at once"
        ) from error


@contextmanager
def write_summary(summary: Summary, folder: RunFolder) -> Iterator[None]:
    """Write the summary of a run at its end, with the status of the error in the body if any.

    The summary of a resumed run is replaced only after the run has advanced. If the run is refused,
    stopped or killed before its first new step, its directory doesn't change.
    """
    earlier_metrics = read_outcome(folder.path).get("metrics")
    started_at = time.perf_counter()
    try:
        yield
        if folder.advanced.is_held and not folder.accepted.is_held and summary.status != "stopped":
            # The run was accepted and trained no step, so the earlier metrics are still valid.
            metrics = {name: value for name, value in summary.metrics.items() if value is not None}
            if isinstance(earlier_metrics, dict):
                metrics = {**earlier_metrics, **metrics}
            summary.metrics = metrics
            folder.advanced.release()
    except BaseException as error:
        summary.status = get_status_after(error)
        summary.reason = str(error) or type(error).__name__
        summary.exit_status = get_exit_status(error)
        raise
    finally:
        summary.time["total_s"] = time.perf_counter() - started_at
        # If a failed run can't write its summary, the first failure is reported.
        with suppress(OSError) if summary.status == "failed" else nullcontext():
            # Without its recipe the directory is still free for a run.
            if not folder.advanced.is_held and (folder.path / RECIPE).exists():
                with conclude():
                    summary.write(folder.path)


@contextmanager
def record_time(summary: Summary, name: str) -> Iterator[None]:
    """Record the seconds of the body in `summary.time`, unless it raises."""
    started_at = time.perf_counter()
    yield
    summary.time[name] = time.perf_counter() - started_at


SAVING = {"train", "checkpoint"}
"""Stages of a run that can be resumed."""
NOT_SAVED = "no step yet; the run begins again with"


@contextmanager
def open_run(
    recipe: Recipe, options: RunOptions, features: RunFeatures, ranks: Ranks
) -> Iterator[RunContext]:
    """Open the directory of a run, locked against other runs, with its log and its summary.

    Handles signals and writes the summary at the end. Only the first process writes; the others
    print. Raises RecipeError if the recipe doesn't fit the processes or the run that it resumes.
    """
    recipe, folder = place_run(recipe, options, features, ranks, ranks.size)
    run_dir = folder.path
    summary = Summary(recipe.name, recipe.device.name, recipe.seed, recipe.stages, str(run_dir))
    with handle_signals(options.signals), ExitStack() as stack:
        stack.enter_context(record_group(ranks.rank, ranks.size))
        stack.enter_context(convert_os_errors(run_dir))
        if not ranks.is_first:
            stack.enter_context(convert_value_reads())
            stack.enter_context(convert_out_of_memory())
            yield RunContext(recipe, options, folder, Reporter(), summary, features=features)
            return
        lock = stack.enter_context(run_directory.lock_run(run_dir, new=not folder.resuming))
        reporter = stack.enter_context(Reporter(run_dir, options.console, delay_log=True))
        stack.enter_context(log_by_level(reporter, recipe.monitor.log_level))
        stack.enter_context(write_summary(summary, folder))
        # Errors are converted here too, so that the summary has the converted error.
        stack.enter_context(convert_os_errors(run_dir))
        stack.enter_context(convert_value_reads())
        stack.enter_context(convert_out_of_memory())
        context = RunContext(recipe, options, folder, reporter, summary, lock, features=features)
        stack.enter_context(end_with(partial(_end_interrupted, context)))
        # If the process is killed after this, the run has no summary.
        folder.advanced.add(partial((run_dir / run_directory.SUMMARY).unlink, missing_ok=True))
        folder.advanced.add(partial(recorded_recipe.write_recipe, run_dir, recipe))
        folder.accepted.add(reporter.start_log)
        reporter.print_stage("recipe", f"{recipe.name}, seed {recipe.seed}; writing to {run_dir}")
        if not lock.is_certain:
            reporter.warn(f"{run_dir}: has no locks, so nothing keeps other processes out of it")
        yield context


def _end_interrupted(context: RunContext) -> None:
    """Report and record that a signal ends the run and its process at once."""
    summary = context.summary
    _record_stop(context, str(context.options.signals.reason))
    advise_to_resume(context.recipe, context.options, context.run_dir, context.reporter)
    context.reporter.print_stage("stopped", f"{summary.reason}; {context.run_dir}")
    has_recipe = (context.run_dir / run_directory.RECIPE).exists()
    if has_recipe and not context.folder.advanced.is_held:
        summary.write(context.run_dir)


def _record_stop(context: RunContext, reason: str) -> None:
    summary = context.summary
    summary.status = "stopped"
    summary.reason = reason
    summary.exit_status = get_exit_status("stopped")


def place_run(
    recipe: Recipe, options: RunOptions, features: RunFeature, ranks: Ranks, processes: int
) -> tuple[Recipe, RunFolder]:
    """Return the recipe for a number of processes, and its directory, a new or a resumed one.

    Raises RecipeError if the recipe fits neither the processes nor the run to resume.
    """
    recipe = features.fit(recipe, processes)

    def choose() -> tuple[str, bool]:
        run_dir = features.find_run(recipe)
        restore = features.restore_run(recipe, run_dir)
        if run_dir is not None and restore is None:
            return str(run_dir), True
        if options.run_dir:
            run_dir = run_directory.make_run_dir(options.run_dir)
        else:
            run_dir = run_directory.create_run_dir(recipe.name)
        if restore is not None:
            restore(run_dir)
        return str(run_dir), restore is not None

    path, resuming = ranks.agree(choose, timeout_s=features.restore_s)
    if resuming:
        recipe = features.resume(recipe, Path(path))
    accepted = HeldWrites(held=resuming)
    advanced = HeldWrites(held=resuming)
    return recipe, RunFolder(Path(path), accepted, advanced, resuming, ranks)


@contextmanager
def conclude_run(context: RunContext) -> Iterator[None]:
    """Report how the stages in the body end, and the command that resumes the run."""
    summary = context.summary
    reporter = context.reporter
    run_dir = context.run_dir
    reference = find_reference(context.recipe.name, context.options.recipe_folder)

    def has_saved() -> bool:
        # A run that fails before training would fail again, so it isn't resumed.
        return summary.steps > 0 and bool(list_saved_steps(run_dir / FOLDER))

    try:
        yield
    except BaseException as caught:
        error = context.options.signals.recognise(caught)
        # With several processes a signal is raised too, so that the others don't wait for this one.
        if not isinstance(error, Interrupted) or context.ranks.size > 1:
            if isinstance(error, NonFiniteStepError) and error.advice:
                reporter.print_stage("resume", error.advice)
            elif has_saved():
                advise_to_resume(context.recipe, context.options, run_dir, reporter)
            if error is caught:
                raise
            raise error from caught
        _record_stop(context, str(error))
    with conclude():
        if summary.status == "stopped" or (summary.status == "failed" and has_saved()):
            advise_to_resume(context.recipe, context.options, run_dir, reporter)
        if summary.time.get("first_step_s") is not None:
            reporter.print_stage("time", describe_start_up(summary.time))
        if reference is not None and context.ranks.is_first and summary.metrics:
            summary.reference = reference.compare(summary, run_dir)
            reporter.print_stage("reference", describe_comparison(summary.reference))
        reporter.print_stage(summary.status, f"{summary.reason or 'all stages'}; {run_dir}")


def advise_to_resume(
    recipe: Recipe, options: RunOptions, run_dir: Path, reporter: Reporter
) -> None:
    """Print which step is saved and the command that resumes a run, if it can be resumed."""
    if set(recipe.stages) >= SAVING:
        advice = options.how_to_resume(run_dir, recipe.checkpoint.restore)
        if advice is not None:
            saved = list_saved_steps(run_dir / FOLDER)
            text = f"step {saved[-1]:,}; the run goes on from there with" if saved else NOT_SAVED
            reporter.print_stage("saved", text)
            reporter.print_stage("resume", advice)


def open_backend(context: RunContext) -> Backend:
    """Open the recipe's devices, and report how several devices share a batch."""
    recipe = context.recipe
    backend = recipe.device.open(recipe.parallel)
    context.summary.versions = list_versions(backend.describe())
    if recipe.parallel.mode != "none":
        # Imported here, since few runs have several devices.
        from pipeline.training.parallel.devices import describe_layout

        line = describe_layout(recipe.parallel, recipe.train.batch_size, context.ranks)
        context.reporter.print_stage("parallel", line)
    return backend


def record_data(
    context: RunContext, dataset: Dataset, device: jax.Device, rate_files: Mapping[str, Any]
) -> RunContext:
    """Record the provenance and the data of the run; return the context with the provenance.

    `rate_files` has the fingerprints of files of learning rates, by key. Raises DataError if a run
    to resume had other data.
    """
    recipe = context.recipe
    text = dataset.text
    if context.ranks.is_first:
        # The whole split is recorded, since `eval.samples` may change.
        splits = {"train": dataset.train, "eval": dataset.whole_eval}
        process = describe_process(recipe.seed, context.summary.versions, device, splits)
        if rate_files:
            process = replace(process, data={**process.data, "learning rates": rate_files})
        if context.resuming and list_saved_steps(context.run_dir / FOLDER):
            # Imported here, since few runs are resumed.
            from pipeline.stages.record.continuity import require_same_data, require_same_origin

            on_changed = recipe.train.resume_changed
            warn = context.reporter.warn
            if recipe.train.ledger and on_changed == "allow":
                require_same_data(context.run_dir, process)
            require_same_origin(context.run_dir, process, on_changed, warn)
        context.folder.accepted.add(partial(add_provenance, context.run_dir, process))
        if text is not None:
            # Imported here, since few networks read texts.
            from pipeline.data.text.text_format import write_tokenizer

            context.folder.accepted.add(partial(write_tokenizer, context.run_dir, text))
        context = replace(context, process=process)
    trains = "train" in recipe.stages and context.ranks.is_first
    brightness = None
    if trains and dataset.raw_image is not None:
        from pipeline.stages.record.brightness import measure_brightness

        samples = dataset.train.columns[next(iter(dataset.raw_inputs))]
        brightness = measure_brightness(samples)
    context.summary.data = {
        "columns": {
            name: {"shape": list(spec.shape), "dtype": spec.dtype}
            for name, spec in dataset.raw_inputs.items()
        },
        "classes": list(dataset.classes),
        "samples": {"train": len(dataset.train), "eval": len(dataset.whole_eval)},
        "targets": dataset.targets.to_dict(),
        **({} if dataset.table is None else {"table": dataset.table.to_dict()}),
        **({} if text is None else {"text": text.to_dict()}),
        **({} if dataset.audio is None else {"audio": dataset.audio.to_dict()}),
        **({} if dataset.scale is None else {"scale": dataset.scale.model_dump(mode="json")}),
        **({} if brightness is None else {"brightness": brightness.to_dict()}),
    }
    return context
