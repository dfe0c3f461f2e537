"""Initial state of a run: with fresh or restored weights, or from its last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp

from pipeline.checkpoint.host_state import HostState
from pipeline.core.errors import DataError, RecipeError, RunError
from pipeline.core.files.bounded_read import read_json
from pipeline.core.host.memory import require_room
from pipeline.data.inputs import Dataset
from pipeline.stages.build import Built
from pipeline.stages.record.run_directory import SUMMARY, find_run_dir
from pipeline.stages.runner.context import CompiledRun, RunContext
from pipeline.training.parallel.state_sharing import StateSharing, make_state_sharing
from pipeline.training.state import TrainState, count_bytes

if TYPE_CHECKING:
    from pipeline.stages.fine_tuning import Restored


def read_restored(context: RunContext, dataset: Dataset, built: Built) -> Restored | None:
    """Read the weights that `checkpoint.restore` names; None if it is null.

    Raises DataError if they can't be read or don't match the network.
    """
    recipe = context.recipe
    if recipe.checkpoint.restore is None:
        return None
    # Imported here, since few runs need it.
    from pipeline.stages.fine_tuning import restore_weights_of

    restored = restore_weights_of(recipe, dataset, built.state, context.reporter.warn)
    _warn_of_other_inputs(recipe.checkpoint.restore, dataset, context.reporter.warn)
    return restored


def _warn_of_other_inputs(source: Path, dataset: Dataset, warn: Callable[[str], None]) -> None:
    """Warn if a run's weights were trained with another tokenizer or other table statistics.

    Such weights have the right shapes, so no check refuses them.
    """
    from pipeline.stages.record.trained_run import parse_samples

    run_dir = find_run_dir(source)
    if run_dir is None:
        return
    try:
        samples = parse_samples(read_json(run_dir / SUMMARY)["data"], run_dir)
    except (OSError, ValueError, TypeError, KeyError, DataError):
        # A killed run has no summary, so there is nothing to compare.
        return
    if samples.text is not None and dataset.text is not None and samples.text != dataset.text:
        warn(
            f"checkpoint.restore: {run_dir} was trained with another tokenizer, so its weights "
            "read these tokens as different ones; dataset.tokenizer can name a tokenizer.json"
        )
    if samples.table is not None and dataset.table not in (None, samples.table):
        warn(
            f"checkpoint.restore: {run_dir} was trained on columns with other means, deviations or "
            "categories, so its weights read these numbers as different ones"
        )
    if samples.scale is not None and dataset.scale not in (None, samples.scale):
        warn(
            f"checkpoint.restore: {run_dir} was trained on series with other means or deviations, "
            "so its weights read these series as different ones"
        )


def make_initial_state(run: CompiledRun, restored: Restored | None) -> tuple[TrainState, HostState]:
    """Return the initial state on the device, and the state of the host.

    Weights are fresh, restored, or from the last checkpoint of a run to resume. Raises RecipeError
    if the run to resume has more steps than the recipe, RunError if weights and optimizer don't fit
    into memory.
    """
    context = run.context
    built = run.built
    executable = run.executable
    placement = run.backend.placement
    sharing = make_state_sharing(
        context.recipe.parallel, built.state, built.step_config.features, placement.parts
    )
    _require_room(context.recipe.model.name, built, placement.free_bytes, sharing)
    if context.resuming:  # no recipe both resumes and restores
        saved = _read_last_checkpoint(context, built)
        # No fresh weights are made, since they would double the memory.
        if saved is not None:
            state, host = saved
            state = context.features.start_state(run, state, resumed=True)
            return executable.put(state), host
    state = executable.init()
    if restored is not None:
        state = restored.replace_weights(state, built.step_config)
        if "train" not in context.recipe.stages and restored.step is not None:
            state = replace(state, step=jnp.asarray(restored.step, jnp.int32))
        context.reporter.print_stage("restore", restored.line)
        state = executable.put(state)
    return context.features.start_state(run, state, resumed=False), HostState()


def _require_room(
    model: str, built: Built, free_bytes: int | None, sharing: StateSharing | None
) -> None:
    """Raise RunError if the state doesn't fit into memory; `free_bytes` is a GPU's, or None."""
    size_bytes = count_bytes(built.state)
    content = f"the weights and the optimizer of {model}"
    try:
        if free_bytes is None:
            require_room(size_bytes, content)
            return
        size_bytes = size_bytes if sharing is None else sharing.part_bytes
        if size_bytes > free_bytes:
            raise ValueError(
                f"{content} would take {size_bytes / 1e9:,.1f} GB of the GPU's memory, and "
                f"{free_bytes / 1e9:,.1f} GB are free"
            )
    except ValueError as error:
        raise RunError(str(error)) from error


def _read_last_checkpoint(context: RunContext, built: Built) -> tuple[TrainState, HostState] | None:
    """Read the last checkpoint of a run to resume; None without one."""
    # Imported here, since few runs are resumed.
    from pipeline.checkpoint.restore import set_others_aside
    from pipeline.stages.record.trained_run import restore_state

    tree = context.recipe.model_dump(mode="json")
    like = built.step_config.select_saved(built.state)
    ranks = context.ranks
    warn = context.reporter.warn
    saved = restore_state(context.run_dir, like, tree, warn) if ranks.is_first else None
    step = ranks.agree(lambda: int(saved[0].step) if saved else 0)
    if not ranks.is_first and step:
        # The first process hasn't written anything yet, so the others read the same files.
        saved = restore_state(context.run_dir, like, tree, warn)
    read_step = int(saved[0].step) if saved else 0
    if read_step != step:
        raise RunError(
            f"{context.run_dir}: process {ranks.rank} reads step {read_step}, and the first "
            f"process step {step}; all must have the same files"
        )
    total = built.run_schedule.total
    if step > total:
        raise RecipeError(f"train: {total} steps in all; {context.run_dir} has done {step} already")
    if ranks.is_first:
        context.folder.accepted.add(partial(set_others_aside, context.run_dir, step, warn))
    context.summary.resumed_from = {"run": str(context.run_dir), "step": step}
    context.reporter.print_stage("resume", f"{context.run_dir} from step {step}")
    return saved
