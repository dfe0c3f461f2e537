"""Where a run starts: fresh weights, those of another run, or what it had saved itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pipeline.data.dataset import Dataset
from pipeline.errors import RecipeError, RunError
from pipeline.host.memory import require_room
from pipeline.runner.context import CompiledRun, RunContext
from pipeline.stages.build import Built
from pipeline.stages.checkpoint.host_state import HostState
from pipeline.stages.checkpoint.restore import restore_state
from pipeline.training.parameters import restart_average
from pipeline.training.state import TrainState

if TYPE_CHECKING:
    from pipeline.weights.restore import Restored


def read_restored(job: RunContext, dataset: Dataset, built: Built) -> Restored | None:
    """The weights that `checkpoint.restore` names; None where it names none.

    Needs no program, so that what is wrong with them is told before anything is compiled. Raises
    DataError where they can't be read or don't match the network.
    """
    recipe = job.recipe
    if recipe.checkpoint.restore is None:
        return None
    # Few runs start from weights, and all would wait for what reads them to be imported.
    from pipeline.weights.network import arrays_of_model
    from pipeline.weights.restore import restore

    network = partial(arrays_of_model, recipe.model, len(dataset.classes), dataset.image)
    return restore(recipe, built.state, network, job.reporter.warn)


def initial_state(
    job: RunContext, made: CompiledRun, restored: Restored | None
) -> tuple[TrainState, HostState]:
    """Fresh weights, those that were restored, or everything a killed run had saved.

    The state is on the device; beside it stands what a checkpoint kept of the host. Raises
    RecipeError when the run to resume is longer already, and RunError where weights and optimizer
    have no room.
    """
    _require_room(job, made)
    state: TrainState = made.executable.init()
    host = HostState()
    if restored is not None:
        state = _warm(job, restored, state)
    elif job.resuming:
        state, host = _taken_up(job, made, state)
    return made.executable.put(state), host


def _require_room(job: RunContext, made: CompiledRun) -> None:
    if job.recipe.device.name == "gpu":
        return
    leaves = jax.tree.leaves(made.built.state)
    size_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    try:
        require_room(size_bytes, f"the weights and the optimizer of {job.recipe.model.name}")
    except ValueError as error:
        raise RunError(str(error)) from error


def _warm(job: RunContext, restored: Restored, fresh: TrainState) -> TrainState:
    """The state with the weights that were restored; where nothing is trained, at their step."""
    state = restored.over(fresh)
    state = replace(state, average=restart_average(state.average, state.params))
    if "train" not in job.recipe.stages and restored.step is not None:
        state = replace(state, step=jnp.asarray(restored.step, jnp.int32))
    job.reporter.stage("restore", restored.line)
    return state


def _taken_up(
    job: RunContext, made: CompiledRun, fresh: TrainState
) -> tuple[TrainState, HostState]:
    """What the run had saved last; `fresh` where that is nothing."""
    tree = job.recipe.model_dump(mode="json")
    found = restore_state(job.run_dir, fresh, tree, job.reporter.warn)
    state, host = found or (fresh, HostState())
    step, total = int(state.step), made.built.run_schedule.total
    if step > total:
        raise RecipeError([f"train: {total} steps in all, and {job.run_dir} has done {step}"])
    job.summary.resumed_from = {"run": str(job.run_dir), "step": step}
    job.reporter.stage("resume", f"{job.run_dir} from step {step}")
    return state, host
