"""Sums over a batch from which a second-order optimizer computes the curvature of each layer.

Microbatches, shards and devices add their sums. Only the updates that refresh the curvature compute
them; at other updates the optimizer reuses its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.core.errors import RecipeError
from pipeline.models.modules.layer_capture import LayerCapture, Observations
from pipeline.models.modules.name_stack import UPDATE

T = TypeVar("T")

Moments = Any
"""A tree of float32 arrays."""


@register_dataclass
@dataclass(frozen=True)
class LayerSums:
    """Sums over the valid samples of a batch, for one layer.

    `moments` is 0 at updates that don't refresh. `rows` (int32 scalar) is the number of positions
    of all samples. `number` is the layer's place in the network, from 0.
    """

    moments: Moments
    rows: Array
    number: int = field(metadata={"static": True})


@register_dataclass
@dataclass(frozen=True)
class Curvature:
    """The sums of all layers, by the path of the layer's scope such as `stage_0/conv_1`.

    `count` (int32 scalar) is the number of samples. Captured cotangents times `scale` (float32
    scalar) are the gradients of each sample's loss. `scale` is the inverse of the loss scale, times
    the number of samples if the loss is a mean. `due` (bool scalar): whether this update refreshes.
    """

    layers: Mapping[str, LayerSums]
    count: Array | int
    scale: Array | float
    due: Array


@dataclass(frozen=True)
class CurvatureRule:
    """The sums of each layer that an optimizer needs, and the updates that need them.

    `moments(capture, mask)` returns sums over the samples that mask, bool (B,), marks. They are
    needed at updates 1, 1 + period, 1 + 2 * period, ... `positions(capture)` counts the positions
    of a sample. Devices exchange the sums of a group of layers together. Each entry of `groups` is
    the number of a layer that ends a group; layers after the last entry are one more group.
    """

    moments: Callable[[LayerCapture, Array], Moments]
    positions: Callable[[LayerCapture], int]
    period: int
    groups: tuple[int, ...] = ()

    def is_due(self, updates: Array) -> Array:
        """Return whether the update after this number of updates refreshes, bool ()."""
        return updates % self.period == 0


@jax.named_scope(UPDATE)
def sum_layers(
    rule: CurvatureRule, captures: Observations, mask: Array, due: Array
) -> dict[str, LayerSums]:
    """Return the sums of each layer in one backward pass, by path. Raises RecipeError if `rule`
    has a group that ends after the last layer."""
    if rule.groups and rule.groups[-1] >= len(captures):
        raise RecipeError(
            [
                f"train.optimizer.split_indices = {list(rule.groups)}: must be below "
                f"{len(captures)}, the number of dense and convolutional layers"
            ]
        )

    def sum_moments() -> dict[str, Moments]:
        return {path: rule.moments(capture, mask) for path, capture in captures.items()}

    def zeros() -> dict[str, Moments]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sum_moments))

    moments = compute_if_due(due, sum_moments, zeros)
    count = jnp.sum(mask, dtype=jnp.int32)
    return {
        path: LayerSums(moments[path], count * rule.positions(capture), capture.number)
        for path, capture in captures.items()
    }


def group_layers(rule: CurvatureRule, layers: Mapping[str, LayerSums]) -> list[list[str]]:
    """Return the paths of the layers that devices exchange together, in the network's order."""
    groups: list[list[str]] = [[] for _ in range(len(rule.groups) + 1)]
    for path in sorted(layers, key=lambda path: layers[path].number):
        num_ended = sum(end < layers[path].number for end in rule.groups)
        groups[num_ended].append(path)
    return [group for group in groups if group]


@jax.named_scope(UPDATE)
def exchange_moments(
    rule: CurvatureRule,
    layers: Mapping[str, LayerSums],
    rows: Mapping[str, Array],
    due: Array,
    add: Callable[[list[Moments]], list[Moments]],
) -> dict[str, LayerSums]:
    """Return the sums over all devices. `add` sums the moments of a group over devices; `rows` are
    summed already. Nothing is exchanged at an update that doesn't refresh."""

    def exchange() -> dict[str, Moments]:
        total: dict[str, Moments] = {}
        for paths in group_layers(rule, layers):
            sums = add([layers[path].moments for path in paths])
            total |= dict(zip(paths, sums, strict=True))
        return total

    local = {path: layer.moments for path, layer in layers.items()}
    moments = compute_if_due(due, exchange, lambda: local)
    return {
        path: replace(layer, moments=moments[path], rows=rows[path])
        for path, layer in layers.items()
    }


def compute_if_due(due: Array, compute: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """Return `compute()` if `due` is true, else `otherwise()`. In eager mode Python branches, since
    jax would compile a branch again in every step."""
    if not isinstance(due, jax.core.Tracer):
        return compute() if due else otherwise()
    result: T = jax.lax.cond(due, compute, otherwise)
    return result
