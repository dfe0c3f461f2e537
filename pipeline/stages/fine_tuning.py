"""Fine-tuning: freezing by phases, and learning rates by the depth of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict

from pipeline.config.recipe import Recipe, TrainSpec
from pipeline.models.imported.imported_network import ImportedNetwork
from pipeline.models.layers import standard
from pipeline.models.layers.path_patterns import EXCEPT, Path, covers, is_frozen, require_covered
from pipeline.models.layers.standard import name_scopes
from pipeline.models.modules.jit_layers import list_layers
from pipeline.models.modules.standard import Network
from pipeline.stages.build_checks import blaming_key
from pipeline.training.freezing import optimize_by_phase
from pipeline.training.state import (
    FreezePhase,
    StepConfig,
    list_paths,
    require_trainable,
    split_params,
)
from pipeline.training.step import init_variables

_NORMS = (standard.BatchNorm, standard.LayerNorm, standard.GroupNorm)
"""Layers that share the depth of the layer before them."""


def phases_of(train: TrainSpec, steps_per_epoch: int) -> tuple[FreezePhase, ...]:
    """Return the phases after the first one, each with the patterns of its frozen parameters."""
    starts = [(rule.start(steps_per_epoch), rule.pattern) for rule in train.unfreeze]
    frozen = train.freeze
    phases: dict[int, FreezePhase] = {}
    for start, pattern in sorted(starts, key=itemgetter(0)):
        frozen = (*frozen, f"{EXCEPT}{pattern}")
        phases[start] = FreezePhase(start, frozen)
    return tuple(phases.values())


def fine_tuned(
    recipe: Recipe,
    step_config: StepConfig,
    variables: Mapping[str, Any],
    steps_per_epoch: int,
    seed: np.ndarray,
) -> StepConfig:
    """Return the configuration with phases and rates by depth.

    Raises RecipeError for a pattern that covers no parameter, for a phase that trains nothing or
    nothing new, and for a network that doesn't tell its layers apart.
    """
    train = recipe.train
    params = variables["params"]
    phases = phases_of(train, steps_per_epoch)
    with blaming_key("train.freeze"):
        require_trainable(params, train.freeze)
    with blaming_key("train.unfreeze"):
        _require_new_parameters(train, phases, params)
    with blaming_key("train.lr_rules"):
        patterns = [rule.pattern for rule in train.lr_rules]
        require_covered(patterns, list_paths(params), "parameters")
    if phases:
        with blaming_key("train.optimizer"):
            optimizer = _optimizer_by_phase(train, phases, params)
        step_config = replace(step_config, phases=phases, optimizer=optimizer)
    with blaming_key(f"train.freeze_statistics = {train.freeze_statistics}"):
        _require_fixed(train, step_config, variables, recipe.model.name)
    with blaming_key(f"train.lr_decay_by_layer = {train.lr_decay_by_layer}"):
        if train.lr_decay_by_layer != 1.0:
            scopes = _depths(recipe.model.name, step_config, params, seed)
            step_config = replace(
                step_config, layer_rates=rates_by_depth(scopes, train.lr_decay_by_layer)
            )
    return step_config


def rates_by_depth(scopes: Sequence[Sequence[str]], decay: float) -> tuple[tuple[str, float], ...]:
    """Return factors on the learning rate by scope: 1 for the last group of scopes, and for each
    group before it `decay` times the factor of the next."""
    last = len(scopes) - 1
    return tuple(
        (scope, decay ** (last - depth)) for depth, group in enumerate(scopes) for scope in group
    )


def _optimizer_by_phase(
    train: TrainSpec, phases: Sequence[FreezePhase], params: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Return the clipping, and an optimizer for the parameters of each phase.

    Raises ValueError for a rule of weight decay that covers no trained parameter.
    """
    trained, _ = split_params(params, phases[-1].frozen)
    rules = train.optimizer.decay_rules
    patterns = [rule.pattern for rule in rules]
    require_covered(patterns, list_paths(trained), "parameters", "decay_rules: ")
    optimizers = []
    remaining: Any = params
    for frozen in (train.freeze, *(phase.frozen for phase in phases)):
        new, remaining = split_params(remaining, frozen)
        applied = [r for r in rules if any(covers(r.pattern, path) for path in list_paths(new))]
        spec = train.optimizer.model_copy(update={"decay_rules": tuple(applied)})
        optimizers.append((frozen, spec.build()))
    return optimize_by_phase(train.clip.build(), optimizers)


def _require_new_parameters(
    train: TrainSpec, phases: Sequence[FreezePhase], params: Mapping[str, Any]
) -> None:
    """Require that every rule covers a parameter, and every phase trains more than the last."""
    paths = list_paths(params)
    require_covered([rule.pattern for rule in train.unfreeze], paths, "parameters")
    before = train.freeze
    for phase in phases:
        if not any(is_frozen(before, p) and not is_frozen(phase.frozen, p) for p in paths):
            patterns = ", ".join(p.removeprefix(EXCEPT) for p in phase.frozen[len(before) :])
            raise ValueError(f"{patterns}: is trained before step {phase.start} already")
        before = phase.frozen


def _require_fixed(
    train: TrainSpec, step_config: StepConfig, variables: Mapping[str, Any], model: str
) -> None:
    """Require batch norm that can be fixed, if the recipe fixes it."""
    if train.freeze_statistics == "none":
        return
    if not isinstance(step_config.network, Network):
        raise ValueError(
            f"{model} is no list of layers, whose batch norm could be told apart; must be none"
        )
    norms = {path[:-1] for path in flatten_dict(dict(variables.get("batch_stats", {})))}
    if not norms:
        raise ValueError(f"{model} has no batch norm; must be none")
    frozen = train.freeze
    if train.freeze_statistics == "frozen" and not any(
        all(is_frozen(frozen, (*path, name)) for name in ("scale", "bias")) for path in norms
    ):
        scopes = ", ".join(sorted("/".join(path) for path in norms)[:5])
        raise ValueError(
            f"train.freeze covers scale and bias of none of the {len(norms)} batch norms, such as "
            f"{scopes}; must be all or none"
        )


def _depths(
    model: str, step_config: StepConfig, params: Mapping[str, Any], seed: np.ndarray
) -> list[list[str]]:
    """Return the outermost scopes with parameters, grouped by depth, the first layer's first.

    Normalisation belongs to the layer before it. Parameters of no layer come first.
    """
    if isinstance(step_config.network, Network):
        stack = step_config.network.layers
        named = zip(name_scopes(stack), stack, strict=True)
        order = [(name, isinstance(layer, _NORMS)) for name, layer in named]
    else:
        paths: dict[Path, None] = {}
        with nn.intercept_methods(list_layers(paths)):
            jax.eval_shape(lambda words: init_variables(step_config, words), seed)
        # In the order in which they are called.
        order = [(name, False) for name in dict.fromkeys(path[0] for path in paths)]
    depths: list[list[str]] = []
    for name, joins in order:
        if name in params:
            depths = [*depths[:-1], [*depths[-1], name]] if joins and depths else [*depths, [name]]
    listed = {name for group in depths for name in group}
    loose = [name for name in params if name not in listed]
    if not depths or (loose and isinstance(step_config.network, ImportedNetwork)):
        raise ValueError(f"{model} does not say which layers follow one another; must be 1.0")
    return [loose, *depths] if loose else depths
