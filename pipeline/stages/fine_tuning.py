"""Fine-tuning: a state with the weights of another run or of a file, freezing by phases, and
learning rates by the depth of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from pipeline.checkpoint.restore import Warn, join_problems, read_saved, warn_on_stderr
from pipeline.config.cache import cache_root
from pipeline.config.recipe import Recipe, TrainSpec
from pipeline.core.errors import DataError
from pipeline.core.files.paths import Address
from pipeline.core.host.array_values import find_shapes
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.data.copies.remote_copy import copy_once
from pipeline.data.dataset_spec import find_table_layout
from pipeline.data.inputs import Dataset
from pipeline.models.layers import standard
from pipeline.models.layers.path_patterns import (
    EXCEPT,
    LayerPath,
    covers,
    is_frozen,
    require_covered,
)
from pipeline.models.modules.apply_layers import name_scopes
from pipeline.models.modules.jit_layers import record_module_paths
from pipeline.models.modules.network import Network, is_imported
from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.models.weights.files.weight_files import is_weight_file, read_weights
from pipeline.stages.export.matching import match_weights
from pipeline.stages.export.network import trace_model_arrays
from pipeline.stages.key_errors import blaming_key
from pipeline.stages.record.trained_run import (
    list_changes_of_meaning,
    restore_weights,
    select_complete_weights,
)
from pipeline.stages.step_features import FeatureInputs, make_step_features
from pipeline.training.features.freezing import FreezePhase, optimize_by_phase
from pipeline.training.state import TrainState, list_paths, require_trainable, split_params
from pipeline.training.step_config import StepConfig
from pipeline.training.update import init_with_output

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
    model = recipe.model.fit(find_table_layout(dataset.eval_ops), dataset.targets)
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
        raise ValueError(f"{problem}; name one, as in ADDRESS/{HUB_FILE}")
    return files[0]


def read_source(source: Path, warn: Warn = warn_on_stderr) -> tuple[Arrays, int | None]:
    """Return the arrays of a weight file or a checkpoint, and the step; it is None for a file.

    A checkpoint that has adapters alone is completed by their base. Raises DataError if they can't
    be read.
    """
    if is_weight_file(source) or source.is_file():
        return read_weights(source), None
    if not source.exists():
        raise DataError(f"{source}: there is no such file or run directory")
    saved = read_saved(source, warn)
    return select_complete_weights(source, saved), saved.step


def replace_leaves(variables: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    """Return `variables` with `arrays` in place of the leaves of the same path, in their dtypes.

    Names of arrays are paths, such as `params/conv_0/kernel`.
    """
    leaves = [
        arrays[name].astype(leaf.dtype) if name in arrays else leaf
        for name, leaf in flatten_by_path(variables).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(variables), leaves)


_NORMS = (standard.BatchNorm, standard.LayerNorm, standard.RmsNorm, standard.GroupNorm)
"""Layers that share the depth of the layer before them."""


def make_phases(train: TrainSpec, steps_per_epoch: int) -> tuple[FreezePhase, ...]:
    """Return the phases after the first, in order, with the patterns of their frozen parameters."""
    starts = [(rule.start(steps_per_epoch), rule.pattern) for rule in train.unfreeze]
    frozen = train.freeze
    phases: dict[int, FreezePhase] = {}
    for start, pattern in sorted(starts, key=itemgetter(0)):
        frozen = (*frozen, f"{EXCEPT}{pattern}")
        # If several rules start together, the last one's entry has the patterns of all.
        phases[start] = FreezePhase(start, frozen)
    return tuple(phases.values())


@dataclass(frozen=True)
class FineTuning:
    """Changes of a step for fine-tuning: an optimizer, phases, and factors on learning rates."""

    optimizer: optax.GradientTransformation | None
    """The optimizer of groups or phases; None: the recipe's optimizer for all parameters."""
    phases: tuple[FreezePhase, ...]
    layer_rates: tuple[tuple[str, float], ...]
    """(scope, factor on its learning rate)."""

    def apply(self, recipe: Recipe, step_config: StepConfig, inputs: FeatureInputs) -> StepConfig:
        """Return the step's configuration with its features, made of `inputs`."""
        inputs = replace(inputs, phases=self.phases, layer_rates=self.layer_rates)
        optimizer = self.optimizer or step_config.optimizer
        features = make_step_features(recipe, inputs)
        return replace(step_config, optimizer=optimizer, features=features)


def plan_fine_tuning(
    recipe: Recipe,
    step_config: StepConfig,
    variables: Mapping[str, Any],
    steps_per_epoch: int,
    seed: np.ndarray,
) -> FineTuning:
    """Return the recipe's phases and learning rates by depth.

    Raises RecipeError for a pattern that covers no parameter, for a phase without new trained
    parameters, and for a network without an order of layers.
    """
    train = recipe.train
    params = variables["params"]
    phases = make_phases(train, steps_per_epoch)
    with blaming_key("train.freeze"):
        require_trainable(params, train.freeze)
    with blaming_key("train.unfreeze"):
        _require_new_parameters(train, phases, params)
    paths = list_paths(params)
    optimizer = None
    layer_rates: tuple[tuple[str, float], ...] = ()
    with blaming_key("train.lr_rules"):
        require_covered([rule.pattern for rule in train.lr_rules], paths, "parameters")
    if train.optimizers:
        trained = [path for path in paths if not is_frozen(train.freeze, path)]
        with blaming_key("train.optimizers"):
            patterns = [rule.pattern for rule in train.optimizers]
            require_covered(patterns, trained, "trained parameters")
            optimizer = _make_grouped_optimizer(train)
    if phases:
        with blaming_key("train.optimizer"):
            optimizer = _make_phased_optimizer(train, phases, params)
    with blaming_key(f"train.freeze_statistics = {train.freeze_statistics}"):
        _require_fixed(train, step_config, variables, recipe.model.name)
    decay = train.lr_decay_by_layer
    if decay != 1.0:
        with blaming_key(f"train.lr_decay_by_layer = {decay}"):
            scopes = _group_scopes(recipe.model.name, step_config, params, seed)
        layer_rates = compute_depth_rates(scopes, decay)
    return FineTuning(optimizer, phases, layer_rates)


def compute_depth_rates(
    scopes: Sequence[Sequence[str]], decay: float
) -> tuple[tuple[str, float], ...]:
    """Return (scope, factor on its learning rate) for each of `scopes`, which are grouped by depth.

    The factor is 1 for the last group, and smaller by a factor of `decay` for each group before it.
    """
    last = len(scopes) - 1
    return tuple(
        (scope, decay ** (last - depth)) for depth, group in enumerate(scopes) for scope in group
    )


def _make_grouped_optimizer(train: TrainSpec) -> optax.GradientTransformation:
    """Return clipping, then for each parameter the optimizer of the last rule that covers it."""
    patterns = tuple(rule.pattern for rule in train.optimizers)
    optimizers = (train.optimizer, *(rule.optimizer for rule in train.optimizers))
    # Each optimizer leaves out the parameters that later rules cover.
    groups = [(patterns[number:], spec.build()) for number, spec in enumerate(optimizers)]
    return optimize_by_phase(train.clip.build(), groups)


def _make_phased_optimizer(
    train: TrainSpec, phases: Sequence[FreezePhase], params: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Return clipping, followed by an optimizer for the new parameters of each phase."""
    trained, _ = split_params(params, phases[-1].frozen)
    rules = train.optimizer.decay_rules
    patterns = [rule.pattern for rule in rules]
    require_covered(patterns, list_paths(trained), "parameters", "decay_rules: ")
    optimizers = []
    remaining: Any = params
    for frozen in (train.freeze, *(phase.frozen for phase in phases)):
        new_params, remaining = split_params(remaining, frozen)
        paths = list_paths(new_params)
        # An optimizer refuses rules that cover none of its parameters.
        new_rules = [rule for rule in rules if any(covers(rule.pattern, path) for path in paths)]
        spec = train.optimizer.model_copy(update={"decay_rules": tuple(new_rules)})
        optimizers.append((frozen, spec.build()))
    return optimize_by_phase(train.clip.build(), optimizers)


def _require_new_parameters(
    train: TrainSpec, phases: Sequence[FreezePhase], params: Mapping[str, Any]
) -> None:
    """Raise ValueError unless every rule covers a parameter, and every phase trains new ones."""
    paths = list_paths(params)
    require_covered([rule.pattern for rule in train.unfreeze], paths, "parameters")
    earlier = train.freeze
    for phase in phases:
        frozen_before = [path for path in paths if is_frozen(earlier, path)]
        if all(is_frozen(phase.frozen, path) for path in frozen_before):
            new_patterns = phase.frozen[len(earlier) :]
            text = ", ".join(pattern.removeprefix(EXCEPT) for pattern in new_patterns)
            raise ValueError(f"{text}: is trained before step {phase.start} already")
        earlier = phase.frozen


def _require_fixed(
    train: TrainSpec, step_config: StepConfig, variables: Mapping[str, Any], model: str
) -> None:
    """Raise ValueError if the network has no batch statistics that the recipe would fix."""
    if train.freeze_statistics == "none":
        return
    if not isinstance(step_config.network, Network):
        raise ValueError(
            f"{model} isn't a list of layers, so its batch norms can't be found; must be none"
        )
    norms = {path[:-1] for path in flatten_dict(dict(variables.get("batch_stats", {})))}
    if not norms:
        raise ValueError(f"{model} has no batch norm; must be none")
    frozen = train.freeze
    names = ("scale", "bias")
    fixed = [path for path in norms if all(is_frozen(frozen, (*path, name)) for name in names)]
    if train.freeze_statistics == "frozen" and not fixed:
        scopes = ", ".join(sorted("/".join(path) for path in norms)[:5])
        raise ValueError(
            f"train.freeze must cover scale and bias of one of the {len(norms)} batch norms, such "
            f"as {scopes}; else must be all or none"
        )


def _group_scopes(
    model: str, step_config: StepConfig, params: Mapping[str, Any], seed: np.ndarray
) -> list[list[str]]:
    """Return the outermost scopes with parameters, grouped by depth, from the first layer on.

    A normalisation has the depth of the layer before it. Parameters outside of layers come first.
    Raises ValueError if the order of layers is unknown.
    """
    if isinstance(step_config.network, Network):
        stack = step_config.network.layers
        pairs = zip(name_scopes(stack), stack, strict=True)
        order = [(name, isinstance(layer, _NORMS)) for name, layer in pairs]
    else:
        paths: dict[LayerPath, None] = {}
        with record_module_paths(paths):
            find_shapes(lambda words: init_with_output(step_config, words), seed)
        # Paths are in the order of calls.
        order = [(name, False) for name in dict.fromkeys(path[0] for path in paths)]
    depths: list[list[str]] = []
    for name, is_norm in order:
        if name in params and is_norm and depths:
            depths[-1].append(name)
        elif name in params:
            depths.append([name])
    grouped = {name for group in depths for name in group}
    ungrouped = [name for name in params if name not in grouped]
    if not depths or (ungrouped and is_imported(step_config.network)):
        raise ValueError(f"the order of the layers of {model} is unknown; must be 1.0")
    return [ungrouped, *depths] if ungrouped else depths
