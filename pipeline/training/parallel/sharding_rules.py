"""Shardings of parameters and of results of layers along the axes of a mesh, by pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec

from pipeline.core.files.name_text import find_nearest, show_name
from pipeline.core.host.tree_paths import format_path
from pipeline.models.layers.path_patterns import LayerPath, covers, require_covered
from pipeline.models.modules.jit_layers import observe_modules
from pipeline.training.parallel.parallel_spec import ParallelSpec, ShardingSpec
from pipeline.training.parallel.state_sharing import DevicePlacement

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShardingRules:
    """Rules that shard parameters and results of layers between the devices of a mesh."""

    specs: tuple[ShardingSpec, ...]
    """Shardings of parameters."""
    constraints: tuple[ShardingSpec, ...]
    """Shardings of results of layers."""

    def make_state_shardings(self, state: Any, placement: DevicePlacement) -> Any:
        """Return the sharding of every leaf of a state. A leaf of the optimizer's state or of the
        average has the sharding of its parameter: the one whose path is the end of the leaf's
        path."""
        shapes = flatten_dict(dict(state.params))
        param_specs = {path: self.find_param_spec(path) for path in shapes}
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        leaf_specs = [
            _find_leaf_spec(format_path(path), leaf, shapes, param_specs) for path, leaf in leaves
        ]
        return jax.tree.unflatten(structure, [placement.make_sharding(spec) for spec in leaf_specs])

    def find_param_spec(self, path: LayerPath) -> PartitionSpec:
        """Return the sharding of a parameter by the last rule that covers it; if none does, it is
        replicated."""
        covering = [rule for rule in self.specs if covers(rule.pattern, path)]
        return _make_spec(covering[-1]) if covering else PartitionSpec()

    def constrain(self, placement: DevicePlacement) -> Callable[..., Any]:
        """Return an interceptor of flax modules that shards results by `constraints`."""

        def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            result = call(*args, **kwargs)
            if context.method_name != "__call__" or not isinstance(result, jax.Array):
                return result
            layer = "/".join(context.module.path)
            covering = [
                rule
                for rule in self.constraints
                if fnmatchcase(layer, rule.pattern) and len(rule.axes) == result.ndim
            ]
            if not covering:
                return result
            sharding = placement.make_sharding(_make_spec(covering[-1]))
            return jax.lax.with_sharding_constraint(result, sharding)

        return intercept

    def require_fit(
        self, params: Mapping[str, Any], sizes: Mapping[str, int], batch_axes: Sequence[str]
    ) -> None:
        """Raise ValueError if the rules don't fit the parameters and the sizes of the mesh's axes.
        Errors are: a pattern that covers nothing, a wrong number of dimensions, a size that can't
        be divided among devices, and an axis of the mesh along which nothing is sharded."""
        flat = flatten_dict(dict(params))
        require_covered([rule.pattern for rule in self.specs], list(flat), "parameters")
        for path, leaf in flat.items():
            spec = self.find_param_spec(path)
            if spec:
                _require_divisible("/".join(path), leaf.shape, spec, sizes)
        rules = (*self.specs, *self.constraints)
        used_axes = {axis for rule in rules for entry in rule.entries for axis in entry}
        for axis, size in sizes.items():
            if size > 1 and axis not in (*used_axes, *batch_axes):
                raise ValueError(f"nothing is sharded along the axis {axis} of {size} devices")

    def require_layers(self, ranks: Mapping[str, AbstractSet[int]]) -> None:
        """Raise ValueError if the constraints don't fit `ranks`, the result of `list_layer_ranks`.
        Errors are: a pattern that matches no layer, and a number of entries that is the number of
        dimensions of none of the matching layers."""
        for rule in self.constraints:
            paths = [path for path in ranks if fnmatchcase(path, rule.pattern)]
            if not paths:
                guess = find_nearest(rule.pattern, ranks)
                hint = f"; did you mean {guess}?" if guess else ""
                raise ValueError(
                    f"pattern {show_name(repr(rule.pattern))} matches none of the {len(ranks)} "
                    f"layers, such as {min(ranks)}{hint}"
                )
            if not any(len(rule.axes) in ranks[path] for path in paths):
                rank_text = " or ".join(map(str, sorted(ranks[paths[0]])))
                raise ValueError(
                    f"{paths[0]} computes arrays of {rank_text} dimensions, "
                    f"but axes has {len(rule.axes)} entries"
                )


def list_layer_ranks(trace: Callable[[], Any]) -> dict[str, set[int]]:
    """Return by layer path the ranks of the arrays that the layer computes while `trace` runs."""
    ranks_by_layer: dict[str, set[int]] = {}

    def record_rank(module: nn.Module, result: Any) -> None:
        if isinstance(result, jax.Array):
            ranks_by_layer.setdefault("/".join(module.path), set()).add(result.ndim)

    with observe_modules(on_result=record_rank):
        trace()
    ranks_by_layer.pop("", None)
    return ranks_by_layer


def make_sharding_rules(parallel: ParallelSpec) -> ShardingRules | None:
    """Return the sharding rules of a recipe; None if every device has all parameters."""
    if parallel.mode not in ("semi_auto", "auto"):
        return None
    return ShardingRules(parallel.specs, parallel.constraints)


def _make_spec(rule: ShardingSpec) -> PartitionSpec:
    return PartitionSpec(*(entry or None for entry in rule.entries))


def _require_divisible(
    name: str, shape: Shape, spec: PartitionSpec, sizes: Mapping[str, int]
) -> None:
    """Raise ValueError if `spec` doesn't have an entry for each dimension of `shape`, or if the
    devices along a dimension's axes don't divide its size."""
    if len(spec) != len(shape):
        raise ValueError(
            f"{name} has {len(shape)} dimensions, {list(shape)}, but axes has {len(spec)} entries"
        )
    for dimension, entry in enumerate(spec):
        axes = (entry,) if isinstance(entry, str) else entry or ()
        size = prod(sizes[axis] for axis in axes)
        if shape[dimension] % size:
            multiple = shape[dimension] // size * size
            raise ValueError(
                f"{name}: dimension {dimension} of size {shape[dimension]} can't be divided among "
                f"the {size} devices of axis {' and '.join(axes)}; {multiple} or "
                f"{multiple + size} would"
            )


def _find_leaf_spec(
    path: str,
    leaf: Any,
    shapes: Mapping[LayerPath, Any],
    param_specs: Mapping[LayerPath, PartitionSpec],
) -> PartitionSpec:
    """Return the sharding of the parameter that has the leaf's shape, and whose path is the end of
    the leaf's path; without such a parameter, the leaf is replicated."""
    keys = tuple(path.split("/"))
    for length in range(len(keys), 0, -1):
        end = keys[-length:]
        if end in shapes and shapes[end].shape == leaf.shape:
            return param_specs[end]
    return PartitionSpec()
