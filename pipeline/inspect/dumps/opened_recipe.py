"""Opening of a recipe to compute single steps: data, network, lowerings and a saved state."""

from __future__ import annotations

import io
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from pipeline.backends.base import Backend
from pipeline.backends.initialisation import initialise_state
from pipeline.backends.loading.loader import make_loader
from pipeline.backends.loading.window import LoaderSource
from pipeline.checkpoint.checkpoint_folder import FOLDER, list_saved_steps
from pipeline.config.compose import check_tree
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.reporter import Reporter
from pipeline.data.batch import Batch
from pipeline.data.inputs import Dataset
from pipeline.engine.monitors.log_lines import METRICS, read_lines
from pipeline.inspect.dumps.layer_programs import LayerPrograms
from pipeline.stages.build import Built, build
from pipeline.stages.data import load_data
from pipeline.stages.lower import lower
from pipeline.stages.record.run_directory import (
    LOWERINGS,
    RECIPE,
    RunFolder,
    describe_missing_run,
)
from pipeline.stages.record.trained_run import read_run_recipe, spare_gpus
from pipeline.training.features.freezing import select_phase
from pipeline.training.state import TrainState


def make_silent_reporter() -> Reporter:
    return Reporter(console=Console(file=io.StringIO()))


@dataclass(frozen=True, eq=False)
class OpenedRecipe:
    """A recipe with its data and its network, for one device."""

    recipe: Recipe
    dataset: Dataset
    built: Built
    backend: Backend

    @property
    def device_name(self) -> str:
        return self.backend.describe()["device"]

    def programs(self, step: int) -> LayerPrograms:
        """Return the programs of the step after `step` steps. Raises RecipeError without layers."""
        try:
            return LayerPrograms(select_phase(self.built.step_config, step), self.backend.device)
        except ValueError as error:
            raise RecipeError([f"model {self.recipe.model.name}: {error}"]) from error

    def batch(self, step: int) -> Batch:
        """Read the batch of the step after `step` steps, in numpy."""
        order = self.dataset.train_order
        source = LoaderSource(self.dataset.train, order, self.backend.placement, step + 1)
        with closing(make_loader(source, self.recipe.train.feed)) as loader:
            batch: Batch = jax.tree.map(np.array, loader.read_batch(step + 1))
        return batch

    def fresh_state(self) -> TrainState:
        """Return the state at step 0 with the bits of a run, from the weights of
        `checkpoint.restore` if it is set, or the frozen ones of `lora`."""
        state = initialise_state(self.built.step.init, self.built.seed, self.backend.placement)
        if self.built.step_config.unsaved:
            from pipeline.stages.runner.adapted_run import read_frozen

            return read_frozen(self.recipe, self.dataset).start(state)
        if self.recipe.checkpoint.restore is None:
            return state
        # Imported here, since few recipes start from weights and the import takes time.
        from pipeline.stages.fine_tuning import restore_weights_of

        weights = restore_weights_of(self.recipe, self.dataset, self.built.state, lambda _: None)
        return weights.replace_weights(state, self.built.step_config)

    def complete_state(self, state: TrainState, run_dir: Path) -> TrainState:
        """Return the state of a checkpoint of a run, with the parameters that it lacks."""
        if not self.built.step_config.unsaved:
            return state
        from pipeline.stages.runner.adapted_run import read_frozen

        return read_frozen(self.recipe, self.dataset).complete(state, run_dir)


def build_recipe(recipe: Recipe, reporter: Reporter) -> OpenedRecipe:
    """Read the data of a recipe and build its step; plan the devices if `parallel.mode` is auto."""
    backend = recipe.device.open(recipe.parallel)
    dataset = load_data(recipe, reporter)
    opened = OpenedRecipe(recipe, dataset, build(recipe, dataset, reporter), backend)
    return place_as_planned(opened, recipe.parallel.plan, reporter)


def place_as_planned(opened: OpenedRecipe, plan: Path | None, reporter: Reporter) -> OpenedRecipe:
    """Return a recipe with the devices and shardings of a plan if `parallel.mode` is auto, else as
    it is. `plan` is the plan's file; None: the fastest plan."""
    recipe = opened.recipe
    if recipe.parallel.mode != "auto":
        return opened
    # Imported here, since few recipes plan their devices.
    from pipeline.stages.plan_devices import find_plan, with_plan

    recipe = with_plan(recipe, find_plan(recipe, opened.dataset, opened.built, plan, reporter))
    return replace(opened, recipe=recipe, backend=recipe.device.open(recipe.parallel))


def open_recipe(recipe: Recipe, lowerings_dir: Path | None = None) -> OpenedRecipe:
    """Read the data of a recipe and build its step, silently.

    A data-parallel recipe is computed on one device with the same shards. Lowerings are read from
    the run directory `lowerings_dir`, if it has any.
    """
    recipe = _place_on_one_device(recipe)
    reporter = make_silent_reporter()
    backend = recipe.device.open(recipe.parallel)
    dataset = load_data(recipe, reporter)
    built = build(recipe, dataset, reporter)
    folder = None
    if lowerings_dir is not None and (lowerings_dir / LOWERINGS).is_file():
        folder = RunFolder(lowerings_dir)
    return OpenedRecipe(
        recipe, dataset, lower(recipe, dataset, built, backend, folder, reporter), backend
    )


def rebuild(opened: OpenedRecipe, run_dir: Path) -> OpenedRecipe:
    """Build the step of a recipe again, of another one with the same data, silently, with the
    lowerings of a run."""
    reporter = make_silent_reporter()
    recipe, dataset, backend = opened.recipe, opened.dataset, opened.backend
    folder = RunFolder(run_dir) if (run_dir / LOWERINGS).is_file() else None
    built = build(recipe, dataset, reporter)
    return replace(opened, built=lower(recipe, dataset, built, backend, folder, reporter))


def _place_on_one_device(recipe: Recipe) -> Recipe:
    if not recipe.parallel.is_data_parallel and recipe.launch.name == "auto":
        return recipe
    tree = recipe.whole_tree()
    tree["launch"] |= {"name": "auto", "processes": None, "restarts": 0, "min_processes": None}
    if recipe.parallel.is_data_parallel:
        tree["parallel"] |= {"devices": 1, "mesh": None, "batch_per_device": None}
    return check_tree(tree, length_replaced=True)


def find_newest_step(run_dir: Path) -> int:
    """Return the step of a run's newest checkpoint.

    Raises DataError if it isn't a run or has no checkpoints.
    """
    if not (run_dir / RECIPE).is_file():
        raise DataError(describe_missing_run(run_dir))
    steps = list_saved_steps(run_dir / FOLDER)
    if not steps:
        raise DataError(
            f"{run_dir}: has no checkpoints; train with the stage checkpoint, such as by "
            "checkpoint.every_steps=500"
        )
    return steps[-1]


def open_run_recipe(run_dir: Path) -> OpenedRecipe:
    """Open the recipe of a run. JAX is kept from GPUs unless the run used one.

    Raises DataError if the data can't be read, RecipeError if the recipe isn't valid any more.
    """
    spare_gpus(run_dir)
    return open_recipe(read_run_recipe(run_dir), run_dir)


def logged_loss(run_dir: Path, step: int) -> float | None:
    """Return the loss that a run logged for the step after `step` steps, else None."""
    log = run_dir / METRICS
    if not log.exists():
        return None
    lines = (line for line in read_lines(log) if line.step == step + 1)
    return next((line.numbers().get("loss") for line in lines), None)
