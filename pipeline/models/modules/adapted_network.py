"""A network with low-rank adapters: matrices that are frozen, plus products of two small ones.

Hu et al., LoRA: low-rank adaptation of large language models, 2021 (arXiv 2106.09685);
Kalajdzievski, A rank stabilization scaling factor, 2023 (arXiv 2312.03732); Liu et al., DoRA, 2024
(arXiv 2402.09353).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.models.layers.path_patterns import LayerPath, covers, require_covered

DOWN, UP, MAGNITUDE = "lora_down", "lora_up", "lora_magnitude"
"""Names of an adapter's parameters, in the scope of its matrix."""
ADAPTER_NAMES = (DOWN, UP, MAGNITUDE)
TABLES = ("table", "embedding")
"""Names of matrices that are tables of embeddings or positions, which have no adapters."""
INPUTS_FIRST = ("kernel", "router")
"""Ends of names of matrices (inputs, outputs), such as `recurrent_kernel`; others are PyTorch's,
(outputs, inputs)."""


@dataclass(frozen=True)
class AdapterRule:
    """Which matrices W of a network have adapters, and what replaces W.

    Of W (inputs, outputs) it is W + scale * down @ up, with down (inputs, rank) and up (rank,
    outputs). `down` is drawn from U(-1 / sqrt(inputs), 1 / sqrt(inputs)), and `up` is 0, so that
    training begins with W. With `scales_outputs` (DoRA) each output's weights V of that sum are
    replaced by (|W| + magnitude) * V / |V|, in which `magnitude` (outputs,) begins with 0, and |V|
    has no gradient.
    """

    targets: tuple[str, ...]
    """Patterns over the paths of matrices."""
    rank: int
    scale: float
    scales_outputs: bool = False

    def list_matrices(self, params: Mapping[str, Any]) -> list[LayerPath]:
        """Return the paths of all matrices that may have adapters."""
        return [
            path
            for path, leaf in flatten_dict(dict(params)).items()
            if len(leaf.shape) == 2 and len(path) > 1 and path[-1] not in (*ADAPTER_NAMES, *TABLES)
        ]

    def list_targets(self, params: Mapping[str, Any]) -> list[LayerPath]:
        """Return the paths of the matrices that have adapters."""
        paths = self.list_matrices(params)
        return [path for path in paths if any(covers(pattern, path) for pattern in self.targets)]

    def require_fit(self, params: Mapping[str, Any]) -> None:
        """Raise ValueError for a pattern that covers no matrix, two matrices in one scope, and a
        rank above a size of a matrix."""
        require_covered(self.targets, self.list_matrices(params), "matrices", "targets: ")
        flat = flatten_dict(dict(params))
        scopes: dict[LayerPath, LayerPath] = {}
        for path in self.list_targets(params):
            name = "/".join(path)
            other = scopes.setdefault(path[:-1], path)
            if other != path:
                raise ValueError(
                    f"targets: {'/'.join(other)} and {name} are in one scope, which can have one "
                    "adapter; name one of them"
                )
            smaller = min(flat[path].shape)
            if self.rank > smaller:
                raise ValueError(
                    f"rank = {self.rank}: {name} has shape {tuple(flat[path].shape)}; must be at "
                    f"most {smaller}, or leave it out of targets"
                )

    def add_adapters(self, params: Mapping[str, Any], key: Array) -> dict[str, Any]:
        """Return parameters with adapters beside their matrices. An adapter's numbers are derived
        from `key` and its path."""
        flat = flatten_dict(dict(params))
        for path in self.list_targets(params):
            inputs, outputs = _orient(path, flat[path]).shape
            path_key = jax.random.fold_in(key, crc32("/".join((*path, DOWN)).encode()))
            bound = inputs**-0.5
            flat[*path[:-1], DOWN] = jax.random.uniform(
                path_key, (inputs, self.rank), jnp.float32, -bound, bound
            )
            flat[*path[:-1], UP] = jnp.zeros((self.rank, outputs), jnp.float32)
            if self.scales_outputs:
                flat[*path[:-1], MAGNITUDE] = jnp.zeros((outputs,), jnp.float32)
        return unflatten_dict(flat)

    def merge(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return parameters without adapters, whose matrices have what the adapters add."""
        flat = flatten_dict(dict(params))
        merged = {path: leaf for path, leaf in flat.items() if path[-1] not in ADAPTER_NAMES}
        for path in self.list_targets(params):
            scope = path[:-1]
            matrix = _orient(path, flat[path])
            changed = matrix + self.scale * (flat[*scope, DOWN] @ flat[*scope, UP])
            if self.scales_outputs:
                length = jax.lax.stop_gradient(jnp.linalg.norm(changed, axis=0))
                magnitude = jnp.linalg.norm(matrix, axis=0) + flat[*scope, MAGNITUDE]
                changed = changed * (magnitude / jnp.where(length == 0, 1, length))
            merged[path] = _orient(path, changed)
        return unflatten_dict(merged)


def _orient(path: LayerPath, matrix: Array) -> Array:
    """Return a matrix as (inputs, outputs), or such a matrix as `path` has it."""
    return matrix if path[-1].endswith(INPUTS_FIRST) else matrix.T


class _Adapted:
    """Methods that a network with adapters has in place of its class's."""

    adapters: AdapterRule

    def init_with_output(self, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        outputs, variables = super().init_with_output(rngs, *args, **kwargs)  # type: ignore[misc]
        params = self.adapters.add_adapters(variables["params"], rngs)
        return outputs, {**variables, "params": params}

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        params = self.adapters.merge(variables["params"])
        return super().apply({**variables, "params": params}, *args, **kwargs)  # type: ignore[misc]


def adapt_network(network: nn.Module, rule: AdapterRule) -> nn.Module:
    """Return a network of the same class with adapters, which are among its parameters."""
    settings = {
        field.name: getattr(network, field.name)
        for field in fields(network)
        if field.init and field.name not in ("parent", "name")
    }
    adapted: nn.Module = _adapt_class(type(network))(**settings, adapters=rule)  # type: ignore[arg-type]
    return adapted


@cache
def _adapt_class(base: type[nn.Module]) -> Any:
    """Return a subclass with the name of `base`, which is the scope around its layers."""
    namespace = {
        "__annotations__": {"adapters": AdapterRule | None},
        "__module__": __name__,
        "adapters": None,
    }
    return type(base.__name__, (_Adapted, base), namespace)
