"""Initial state of a run: fresh weights, weights of another run, or its own last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pipeline.checkpoint.host_state import HostState
from pipeline.checkpoint.restore import set_others_aside
from pipeline.core.errors import DataError, RecipeError, RunError
from pipeline.core.files.bounded_read import read_json
from pipeline.core.host.memory import require_room
from pipeline.data.dataset import Dataset
from pipeline.stages.build import Built
from pipeline.stages.record.run_directory import SUMMARY, find_run_dir
from pipeline.stages.record.saved_recipe import restore_state
from pipeline.stages.runner.context import CompiledRun, RunContext
from pipeline.training.state import TrainState, restart_average

if TYPE_CHECKING:
    from pipeline.stages.warm_start import Restored


def read_restored(context: RunContext, dataset: Dataset, built: Built) -> Restored | None:
    """Read the weights that `checkpoint.restore` names; None if it names none.

    Needs no compiled program. Raises DataError if they can't be read or don't match the network.
    """
    recipe = context.recipe
    if recipe.checkpoint.restore is None:
        return None
    # Few runs start from weights, and all would wait for its import.
    from pipeline.stages.warm_start import restore_weights_of

    restored = restore_weights_of(recipe, dataset, built.state, context.reporter.warn)
    _warn_of_other_inputs(recipe.checkpoint.restore, dataset, context.reporter.warn)
    return restored


def _warn_of_other_inputs(source: Path, dataset: Dataset, warn: Callable[[str], None]) -> None:
    """Warn if a run's weights were trained with another tokenizer or other table statistics.

    The shapes of tokens and of standardised columns fit all the same.
    """
    from pipeline.stages.export.trained_run import parse_samples

    run_dir = find_run_dir(source)
    if run_dir is None:
        return
    try:
        samples = parse_samples(read_json(run_dir / SUMMARY)["data"], run_dir)
    except (OSError, ValueError, TypeError, KeyError, DataError):
        # A killed run has no summary, and the weights were read all the same.
        return
    if samples.text is not None and dataset.text is not None and samples.text != dataset.text:
        warn(
            f"checkpoint.restore: {run_dir} was trained with another tokenizer, so its weights "
            "take these tokens for others; dataset.tokenizer can name a tokenizer.json"
        )
    if samples.table is not None and dataset.table not in (None, samples.table):
        warn(
            f"checkpoint.restore: {run_dir} was trained on columns with other means, deviations or "
            "categories; its weights take these numbers for others"
        )


def initial_state(run: CompiledRun, restored: Restored | None) -> tuple[TrainState, HostState]:
    """Return fresh weights, restored ones, or the last checkpoint of the run to resume.

    The state is on the device, the host's part of the checkpoint beside it. Raises RecipeError when
    the run to resume is longer than the recipe says, RunError if weights and optimizer don't fit
    into memory.
    """
    context = run.context
    built = run.built
    executable = run.executable
    _require_room(context.recipe.model.name, built, run.backend.placement.free_bytes)
    if context.resuming and restored is None:
        saved = _read_last_checkpoint(context, built)
        # Fresh weights beside these would take as much memory again.
        if saved is not None:
            return executable.put(saved[0]), saved[1]
    state = executable.init()
    if restored is not None:
        state = restored.over(state)
        state = replace(state, average=restart_average(state.average, state.params))
        if "train" not in context.recipe.stages and restored.step is not None:
            state = replace(state, step=jnp.asarray(restored.step, jnp.int32))
        context.reporter.stage("restore", restored.line)
        state = executable.put(state)
    return state, HostState()


def _require_room(model: str, built: Built, free_bytes: int | None) -> None:
    """Raise RunError if the state fits into no memory; `free_bytes` are those of a GPU."""
    leaves = jax.tree.leaves(built.state)
    size_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    what = f"the weights and the optimizer of {model}"
    try:
        if free_bytes is None:
            require_room(size_bytes, what)
        elif size_bytes > free_bytes:
            raise ValueError(
                f"{what} would take {size_bytes / 1e9:,.1f} GB of the GPU's memory, "
                f"{free_bytes / 1e9:,.1f} GB are free there"
            )
    except ValueError as error:
        raise RunError(str(error)) from error


def _read_last_checkpoint(context: RunContext, built: Built) -> tuple[TrainState, HostState] | None:
    """Return what the run saved last; None if it saved nothing."""
    tree = context.recipe.model_dump(mode="json")
    ranks = context.ranks
    warn = context.reporter.warn
    saved = restore_state(context.run_dir, built.state, tree, warn) if ranks.is_first else None
    step = ranks.agree(lambda: int(saved[0].step) if saved else 0)
    if not ranks.is_first and step:
        # Before the first one writes anything.
        saved = restore_state(context.run_dir, built.state, tree, warn)
    own_step = int(saved[0].step) if saved else 0
    if own_step != step:
        raise RunError(
            f"{context.run_dir}: process {ranks.own} reads step {own_step} there, the first one "
            f"step {step}; all need the same files"
        )
    total = built.run_schedule.total
    if step > total:
        raise RecipeError(f"train: {total} steps in all, and {context.run_dir} has done {step}")
    if ranks.is_first:
        context.folder.accepted.add(partial(set_others_aside, context.run_dir, step, warn))
    context.summary.resumed_from = {"run": str(context.run_dir), "step": step}
    context.reporter.stage("resume", f"{context.run_dir} from step {step}")
    return saved
