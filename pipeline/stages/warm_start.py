"""Warm start: a state with the weights of another run or of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.checkpoint.restore import Warn, join_problems, read_saved, warn_on_stderr
from pipeline.config.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError
from pipeline.core.files.address import Address
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.data.copies.remote_copy import copy_once
from pipeline.data.dataset import Dataset
from pipeline.data.tables.encode_table import find_table_layout
from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.models.weights.files.weight_files import is_weight_file, read_weights
from pipeline.stages.export.matching import match_weights
from pipeline.stages.export.network import trace_model_arrays
from pipeline.stages.record.trained_run import list_changes_of_meaning, restore_weights
from pipeline.training.state import TrainState, split_params
from pipeline.training.step_config import StepConfig

HUB_FILE = "model.safetensors"
"""Name of the weight file of most repositories."""


@dataclass(frozen=True)
class Restored:
    """A state with restored weights, and their source."""

    state: TrainState
    """State with shapes in place of those arrays that the source lacks."""
    step: int | None
    """Number of steps after which a run saved the weights; None for a file."""
    line: str
    """Line for the log that names the source."""

    def replace_weights(self, fresh: TrainState, step_config: StepConfig) -> TrainState:
        """Return `fresh` with the restored parameters and collections. States of features with
        arrays like the parameters, such as an average, begin with these."""

        def choose(restored: Any, fresh: Any) -> Any:
            return fresh if isinstance(restored, jax.ShapeDtypeStruct) else restored

        variables = jax.tree.map(choose, self.state.variables, fresh.variables)
        trained, _ = split_params(variables["params"], step_config.never_trained)
        state = fresh.replace_variables(variables)
        for feature in step_config.features:
            if feature.is_like_params:
                state = state.replace_part(feature.name, feature.init(trained))
        return state


def restore_weights_of(recipe: Recipe, dataset: Dataset, like: TrainState, warn: Warn) -> Restored:
    """Return `like` with the parameters and batch statistics that `checkpoint.restore` names.

    `like` may have shapes and dtypes, so that mismatches are found before compiling. Its optimizer,
    step and loss scale stay. Warns of a damaged checkpoint, and of layers and inputs that differ in
    the recipe that trained the weights. Raises DataError if the weights can't be read, or if they
    don't match and `checkpoint.partial` is false; RunError if their address can't be reached.
    """
    spec = recipe.checkpoint
    assert spec.restore is not None, "the caller checks that the recipe names weights"
    path = spec.restore
    if isinstance(path, Address):
        path = copy_once(path, cache_root(recipe.cache), choose_weight_file)
    uses_rules = bool(spec.renames) or spec.partial or spec.rules != "auto"
    if not is_weight_file(path) and not uses_rules:
        tree = recipe.model_dump(mode="json")
        state, saved = restore_weights(path, like, tree, warn)
        if changes := list_changes_of_meaning(saved, tree):
            warn(f"{saved.folder}: trained by another recipe: {join_problems(changes)}")
        return Restored(state, saved.step, f"weights of step {saved.step} from {path}")
    arrays, step = read_source(path, warn)
    model = recipe.model.fit_to_table(find_table_layout(dataset.eval_ops))
    network = trace_model_arrays(model, len(dataset.classes), dataset.inputs)
    matching = match_weights(str(path), arrays, network, spec.renames, spec.rules)
    matching.require(partial=spec.partial)
    origin = str(path) if step is None else f"step {step} of {path}"
    state = like.replace_variables(replace_leaves(like.variables, matching.arrays))
    return Restored(state, step, f"{origin}: {matching.format_counts()}")


def choose_weight_file(names: Sequence[str]) -> str:
    """Return `HUB_FILE`, or else the only weight file. Raises ValueError if there is neither."""
    files = [name for name in names if is_weight_file(Path(name))]
    if HUB_FILE in files:
        return HUB_FILE
    if len(files) != 1:
        problem = f"has {len(files)} weight files" if files else "has no weight file"
        raise ValueError(f"{problem}; name one, as in hf://NAME/REPOSITORY/{HUB_FILE}")
    return files[0]


def read_source(source: Path, warn: Warn = warn_on_stderr) -> tuple[Arrays, int | None]:
    """Return the arrays of a weight file or a checkpoint, and the step; it is None for a file.

    Raises DataError if they can't be read.
    """
    if is_weight_file(source) or source.is_file():
        return read_weights(source), None
    if not source.exists():
        raise DataError(f"{source}: there is no such file or run directory")
    saved = read_saved(source, warn)
    return saved.select_weights(), saved.step


def replace_leaves(variables: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    """Return `variables` with `arrays` in place of the leaves of the same path, in their dtypes.

    Names of arrays are paths, such as `params/conv_0/kernel`.
    """
    leaves = [
        arrays[name].astype(leaf.dtype) if name in arrays else leaf
        for name, leaf in flatten_by_path(variables).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(variables), leaves)
