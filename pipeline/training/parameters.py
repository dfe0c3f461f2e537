"""Parameters by path: which are trained, how fast, from where they start, and their average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.models.layers.model_spec import InitRule
from pipeline.models.layers.path_patterns import Path, covers, require_covered
from pipeline.training.part_specs import AverageSpec, RateRule


def paths_of(params: Mapping[str, Any]) -> list[Path]:
    """The paths of all parameters."""
    return list(flatten_dict(dict(params)))


def split(params: Any, frozen: Sequence[str]) -> tuple[Any, Any]:
    """The parameters that are trained, and those that a pattern freezes (M-06).

    A gradient by the former alone has no backward pass below the first of them, which is where
    `stop_gradient` would cut it; behind a frozen layer with trained ones below it goes on.
    """
    if not frozen:
        return params, {}
    flat = flatten_dict(dict(params))
    stays = {path for path in flat if any(covers(pattern, path) for pattern in frozen)}
    return (
        unflatten_dict({path: leaf for path, leaf in flat.items() if path not in stays}),
        unflatten_dict({path: flat[path] for path in stays}),
    )


def merge(trained: Any, frozen: Any) -> Any:
    """What `split` took apart."""
    if not frozen:
        return trained
    return unflatten_dict({**flatten_dict(dict(trained)), **flatten_dict(dict(frozen))})


def require_trainable(params: Any, frozen: Sequence[str]) -> None:
    """Raise ValueError for a pattern that freezes nothing, and where all is frozen."""
    paths = paths_of(params)
    require_covered(frozen, paths, "parameters")
    if not jax.tree.leaves(split(params, frozen)[0]):
        raise ValueError(
            f"{', '.join(frozen)} freezes all {len(paths)} parameters; nothing is left to train"
        )


def apply_directions(
    params: Any, directions: Any, rate: Array | float, rules: Sequence[RateRule]
) -> Any:
    """p - rate * direction; where a rule covers a parameter, `factor` times that rate."""
    if not rules:
        return jax.tree.map(lambda p, d: p - rate * d, params, directions)
    flat, down = flatten_dict(dict(params)), flatten_dict(dict(directions))
    return unflatten_dict(
        {path: p - rate * _factor(rules, path) * down[path] for path, p in flat.items()}
    )


def _factor(rules: Sequence[RateRule], path: Path) -> float:
    factors = [rule.factor for rule in rules if covers(rule.pattern, path)]
    return factors[-1] if factors else 1.0


def reinitialize(params: Any, rules: Sequence[InitRule], key: Array) -> Any:
    """Fresh parameters, those that a rule covers drawn as the last such rule says.

    Each has a key of its own, made of its path. Raises ValueError where an initialiser does not
    suit the shape, and for a rule that covers nothing.
    """
    if not rules:
        return params
    flat = flatten_dict(dict(params))
    patterns = [rule.pattern for rule in rules]
    require_covered(patterns, list(flat), "parameters", key="init.rules: ")
    for path, leaf in flat.items():
        covering = [rule for rule in rules if covers(rule.pattern, path)]
        if covering:
            own = jax.random.fold_in(key, crc32("/".join(path).encode()))
            flat[path] = covering[-1].init.build()(own, leaf.shape, jnp.float32)
    return unflatten_dict(flat)


def restart_average(average: Any, params: Any) -> Any:
    """An average of parameters that come from elsewhere: they themselves, where it has them."""
    if average is None:
        return None
    flat = flatten_dict(dict(params))
    return unflatten_dict({path: flat[path] for path in paths_of(average)})


def update_ema(average: Any, params: Any, spec: AverageSpec, updates: Array) -> Any:
    """The moving average behind update number `updates` (int32 (), counted from 0)."""
    assert spec.decay is not None, "there is an average where there is a decay"
    count = updates.astype(jnp.float32)
    ramp = (1 + count) / (10 + count)
    decay = jnp.minimum(spec.decay, ramp) if spec.warmup else jnp.float32(spec.decay)
    return jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), average, params)
