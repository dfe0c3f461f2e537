"""Sums over a batch from which a second-order optimizer computes the curvature of each layer.

The sums of microbatches, shards and devices are added. They are computed only at updates that
refresh the curvature. At other updates the optimizer reuses its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.core.errors import RecipeError
from pipeline.models.modules.apply_layers import shape_nhwc
from pipeline.models.modules.layer_capture import (
    LayerCapture,
    Observations,
    grad_observing_layers,
)
from pipeline.models.modules.name_stack import UPDATE
from pipeline.training.forward_pass import ForwardPass, PassResults
from pipeline.training.state import Gradients, TrainState
from pipeline.training.step_feature import StepFeature
from pipeline.training.telemetry import count_updates

T = TypeVar("T")

Moments = Any
"""A tree of float32 arrays."""


@register_dataclass
@dataclass(frozen=True)
class LayerSums:
    """Sums over the valid samples of a batch, for one layer.

    `moments` is 0 at updates that don't refresh the curvature. `num_positions` (int32 scalar) is
    the number of positions in all samples together. `number` is the layer's place in the network,
    from 0.
    """

    moments: Moments
    num_positions: Array
    number: int = field(metadata={"static": True})


@register_dataclass
@dataclass(frozen=True)
class Curvature:
    """The sums of all layers, by the path of the layer's scope such as `stage_0/conv_1`.

    `count` (int32 scalar) is the number of samples. Captured cotangents times `scale` (float32
    scalar) are the gradients of each sample's loss. `scale` is the inverse of the loss scale, times
    the number of samples if the loss is a mean. `due` (bool scalar) is whether this update
    refreshes the curvature.
    """

    layers: Mapping[str, LayerSums]
    count: Array | int
    scale: Array | float
    due: Array


@dataclass(frozen=True)
class CurvatureRule:
    """The sums of each layer that an optimizer needs, and the updates that need them.

    `sum_moments(capture, mask)` returns sums over the samples that the mask, bool (B,), marks. The
    optimizer needs them at updates 1, 1 + period, 1 + 2 * period, ... Devices exchange the
    sums of a group of layers together. `group_ends` are the numbers of the layers that end a group;
    layers after the last one are another group.
    """

    sum_moments: Callable[[LayerCapture, Array], Moments]
    period: int
    group_ends: tuple[int, ...] = ()

    def is_due(self, updates: Array) -> Array:
        """Return whether the update after `updates` updates refreshes the curvature, bool ()."""
        return updates % self.period == 0


@dataclass(frozen=True)
class LayerCurvature(StepFeature):
    """The sums of each layer that the optimizer's update takes as `curvature`."""

    name: ClassVar[str] = "curvature"
    rule: CurvatureRule
    is_mean: bool
    """Whether the loss of a batch is a mean over its samples."""

    def _is_due(self, state: TrainState) -> Array:
        return self.rule.is_due(count_updates(state))

    def differentiate(self, forward: ForwardPass, trained: Any) -> tuple[Any, PassResults]:
        values, results, captures = grad_observing_layers(
            forward, trained, forward.config.apply_lowerings
        )
        due = self._is_due(forward.state)
        layers = sum_layers(self.rule, captures, forward.batch.mask, due)
        return values, results._replace(sums={**results.sums, self.name: layers})

    def exchange_sums(self, state: TrainState, sums: Any, add: Callable[[Any], Any]) -> Any:
        """Return the sums over all devices. Moments are large, so they are exchanged only at
        updates that refresh the curvature."""
        num_positions = add({path: layer.num_positions for path, layer in sums.items()})
        return exchange_moments(self.rule, sums, num_positions, self._is_due(state), add)

    def list_optimizer_arguments(
        self, state: TrainState, gradients: Gradients, count: Array | int, unscale: Array | float
    ) -> Mapping[str, Any]:
        scale = unscale * count if self.is_mean else unscale
        layers = gradients.sums[self.name]
        return {"curvature": Curvature(layers, count, scale, self._is_due(state))}


@jax.named_scope(UPDATE)
def sum_layers(
    rule: CurvatureRule, captures: Observations, mask: Array, due: Array
) -> dict[str, LayerSums]:
    """Return the sums of each layer in one backward pass, by path. Raises RecipeError if `rule`
    has a group that ends after the last layer."""
    if rule.group_ends and rule.group_ends[-1] >= len(captures):
        raise RecipeError(
            [
                f"train.optimizer.split_indices = {list(rule.group_ends)}: must be below "
                f"{len(captures)}, the number of dense and convolutional layers"
            ]
        )

    def sum_moments() -> dict[str, Moments]:
        return {path: rule.sum_moments(capture, mask) for path, capture in captures.items()}

    def make_zeros() -> dict[str, Moments]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sum_moments))

    moments = compute_if_due(due, sum_moments, make_zeros)
    num_samples = jnp.sum(mask, dtype=jnp.int32)
    return {
        path: LayerSums(moments[path], num_samples * count_positions(capture), capture.number)
        for path, capture in captures.items()
    }


def count_positions(capture: LayerCapture) -> int:
    """Return the number of positions in a sample: a layer's outputs of each feature."""
    return prod(shape_nhwc(capture.cotangents, capture.layout)[1:-1])


def group_layers(rule: CurvatureRule, layers: Mapping[str, LayerSums]) -> list[list[str]]:
    """Return the paths of the layers that devices exchange together, in the network's order."""
    groups: list[list[str]] = [[] for _ in range(len(rule.group_ends) + 1)]
    for path in sorted(layers, key=lambda path: layers[path].number):
        num_earlier_groups = sum(end < layers[path].number for end in rule.group_ends)
        groups[num_earlier_groups].append(path)
    return [group for group in groups if group]


@jax.named_scope(UPDATE)
def exchange_moments(
    rule: CurvatureRule,
    layers: Mapping[str, LayerSums],
    num_positions: Mapping[str, Array],
    due: Array,
    add: Callable[[list[Moments]], list[Moments]],
) -> dict[str, LayerSums]:
    """Return the sums over all devices. `add` sums the moments of a group of layers over devices.
    `num_positions` are sums over devices already. At an update that doesn't refresh the curvature,
    nothing is exchanged."""

    def exchange() -> dict[str, Moments]:
        total: dict[str, Moments] = {}
        for paths in group_layers(rule, layers):
            sums = add([layers[path].moments for path in paths])
            total |= dict(zip(paths, sums, strict=True))
        return total

    local = {path: layer.moments for path, layer in layers.items()}
    moments = compute_if_due(due, exchange, lambda: local)
    return {
        path: replace(layer, moments=moments[path], num_positions=num_positions[path])
        for path, layer in layers.items()
    }


def compute_if_due(due: Array, compute: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """Return `compute()` if `due`, bool (), is true, else `otherwise()`. Outside of jit this is a
    Python `if`, since jax would compile both branches again in every step."""
    if not isinstance(due, jax.core.Tracer):
        return compute() if due else otherwise()
    result: T = jax.lax.cond(due, compute, otherwise)
    return result
