"""THOR as an optax transformation: precondition gradients by inverses, refreshed at intervals.

At a refresh the factors of all observed layers are computed from one batch and inverted. Other
updates reuse the inverses. Both are branches of one compiled step. The number of the update selects
the branch, so a sink may begin and end at any update.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pipeline.core.host.tree_paths import flatten_by_path, format_path
from pipeline.training.features.curvature import Curvature, compute_if_due
from pipeline.training.optimizers.thor.factors import (
    Factors,
    compute_factors,
    invert_damped,
    make_blocks,
    precondition,
)


class ThorState(NamedTuple):
    """The number of updates so far, int32 (), and the damped inverses by the kernel's path."""

    updates: Array
    inverses: dict[str, Factors]


def scale_by_thor(
    damping: Callable[[Array], Array], split_dim: int
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation: the gradient of an observed layer's kernel -> A^-1 * gradient *
    G^-1 / T. Other gradients don't change.

    `damping` maps the number of an update, from 0 on, to its damping. Factors are split into blocks
    of at most `split_dim` rows. `update` raises ValueError without `curvature=Curvature(...)`. Only
    `update` gets the observed layers, so `init` makes inverses for every kernel of two or four
    axes. Those of unobserved layers stay 0.
    """

    def init(params: optax.Params) -> ThorState:
        inverses = {}
        for path, leaf in flatten_by_path(params).items():
            if path.endswith("/kernel") and leaf.ndim in (2, 4):
                inverses[path] = Factors(
                    inputs=_make_zeros(prod(leaf.shape[:-1]), split_dim),
                    outputs=_make_zeros(leaf.shape[-1], split_dim),
                )
        return ThorState(jnp.zeros((), jnp.int32), inverses)

    def update(
        updates: optax.Updates,
        state: ThorState,
        params: optax.Params | None = None,
        *,
        curvature: Curvature | None = None,
        **_: Any,
    ) -> tuple[optax.Updates, ThorState]:
        if curvature is None:
            raise ValueError("thor needs sums of layers: update(gradients, ..., curvature=...)")
        observed = {
            path: curvature.layers[path.removesuffix("/kernel")]
            for path in state.inverses
            if path.removesuffix("/kernel") in curvature.layers
        }
        old_inverses = {path: state.inverses[path] for path in observed}
        num_positions = {
            path: layer.num_positions.astype(jnp.float32) for path, layer in observed.items()
        }
        positions = {path: number / curvature.count for path, number in num_positions.items()}

        def refresh() -> dict[str, Factors]:
            factors = {
                path: compute_factors(layer.moments, num_positions[path], curvature.scale)
                for path, layer in observed.items()
            }
            return invert_damped(factors, damping(state.updates), positions)

        def find_direction(path: Any, gradient: Array) -> Array:
            kernel = format_path(path)
            if kernel not in positions:
                return gradient
            return precondition(gradient, inverses[kernel], positions[kernel])

        inverses = compute_if_due(curvature.due, refresh, lambda: old_inverses)
        directions = jax.tree.map_with_path(find_direction, updates)
        return directions, ThorState(state.updates + 1, {**state.inverses, **inverses})

    return optax.GradientTransformationExtraArgs(init, update)


def _make_zeros(features: int, split_dim: int) -> Array:
    """Return zeros in the shape of a factor of `features` rows in blocks, (blocks, size, size)."""
    blocks = make_blocks(features, split_dim)
    return jnp.zeros((blocks.number, blocks.size, blocks.size))


def clip_each_by_norm(limit: float) -> optax.GradientTransformation:
    """Return a transformation that scales every array with an L2 norm above `limit` down to it."""

    def clip(update: Array) -> Array:
        return update * jnp.minimum(1, limit / jnp.maximum(jnp.linalg.norm(update), 1e-30))

    return optax.stateless(lambda updates, _: jax.tree.map(clip, updates))
