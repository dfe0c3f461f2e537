"""Parameters by path: their initialisation, checks of frozen ones, and their average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.models.layers.model_spec import InitRule
from pipeline.models.layers.path_patterns import EXCEPT, Path, covers, require_covered
from pipeline.training.state import split


def paths_of(params: Mapping[str, Any]) -> list[Path]:
    """The paths of all parameters."""
    return list(flatten_dict(dict(params)))


def require_trainable(params: Any, frozen: Sequence[str]) -> None:
    """Raise ValueError for a pattern that freezes nothing, and where all is frozen."""
    paths = paths_of(params)
    require_covered([pattern.removeprefix(EXCEPT) for pattern in frozen], paths, "parameters")
    if not jax.tree.leaves(split(params, frozen)[0]):
        raise ValueError(
            f"{', '.join(frozen)} freezes all {len(paths)} parameters; nothing is left to train"
        )


def reinitialize(params: Any, rules: Sequence[InitRule], key: Array) -> Any:
    """Draw the parameters that a rule covers by the last such rule; the others stay.

    Each has its own key, derived from its path. Raises ValueError where an initialiser does not
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
    """Restart the average at parameters that were loaded: a copy of those that it covers."""
    if average is None:
        return None
    flat = flatten_dict(dict(params))
    return unflatten_dict({path: flat[path] for path in paths_of(average)})
