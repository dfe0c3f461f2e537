"""Modules of flax, linen and nnx, as pure networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.models.imported.calls import call_with, make_with, require_callable_with, takes
from pipeline.models.imported.imported_network import PARAMS, STATISTICS, PureNetwork, Variables


def adapt_module(
    reference: str, found: Any, arguments: Mapping[str, Any], classes: int, dtype: str
) -> PureNetwork:
    """Make a module from a class or a function, or take the one found, and adapt it.

    Raises ValueError for what is no module, and for one that can't be called on images.
    """
    if isinstance(found, nn.Module):
        if arguments:
            raise ValueError(f"{reference}: is a module already, so that arguments must be {{}}")
        return _adapt_linen(reference, found, has_type=False)
    if isinstance(found, nnx.Module):
        raise ValueError(f"{reference}: is an nnx module already; must be its class or a function")
    if not callable(found):
        raise ValueError(f"{reference}: is no class, function or module, but {found!r}")
    has_type = takes(found, "dtype")

    def make(**others: Any) -> Any:
        return make_with(reference, found, arguments, classes, dtype, **others)

    if takes(found, "rngs"):
        return _adapt_nnx(reference, make, has_type)
    made = make()
    if isinstance(made, nnx.Module):
        raise ValueError(f"{reference}: makes an nnx module, and must take rngs, an nnx.Rngs")
    if not isinstance(made, nn.Module):
        raise ValueError(f"{reference}: makes a {type(made).__name__}, which is no flax module")
    return _adapt_linen(reference, made, has_type)


def _adapt_linen(reference: str, module: nn.Module, has_type: bool) -> PureNetwork:
    require_callable_with(reference, module.__call__, ("images",))
    return LinenNetwork(module, has_type)


def _adapt_nnx(reference: str, make: Callable[..., Any], has_type: bool) -> PureNetwork:
    abstract = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    if not isinstance(abstract, nnx.Module):
        raise ValueError(f"{reference}: makes a {type(abstract).__name__}, which is no nnx module")
    require_callable_with(reference, abstract.__call__, ("images",))
    graph, *_, others = _split(abstract)
    if others:
        path, variable = nnx.to_flat_state(others)[0]
        raise ValueError(
            f"{reference}: {'/'.join(map(str, path))} is a {type(variable).__name__}; training "
            "carries nnx.Param and nnx.BatchStat alone"
        )
    return NnxNetwork(make, graph, has_type)


@dataclass(frozen=True)
class LinenNetwork:
    """A linen module."""

    module: nn.Module
    has_type: bool

    @property
    def root(self) -> str:
        """The scope of the module itself, which flax names for its class."""
        return type(self.module).__name__

    def init(self, key: Array, images: Array, seed: int) -> Variables:
        """Fresh variables. Raises ValueError for a collection that training does not carry."""

        def call(module: Any, images: Array) -> Any:
            return call_with(module, (images,), train=False)

        variables = meta.unbox(nn.init(call, self.module)(key, images))
        others = sorted(set(variables) - {PARAMS, STATISTICS})
        if others:
            raise ValueError(
                f"has variables in the collection {others[0]}; training carries {PARAMS} and "
                f"{STATISTICS} alone"
            )
        return variables

    def apply(
        self, variables: Variables, images: Array, key: Array | None, *, train: bool
    ) -> tuple[Any, Variables]:
        """Logits, and the statistics afterwards."""

        def call(module: Any, images: Array) -> Any:
            return call_with(module, (images,), train=train)

        # Streams without a key of their own, such as one for stochastic depth, use that of params.
        keys = {} if key is None else {"dropout": key, PARAMS: jax.random.fold_in(key, 1)}
        mutable = [STATISTICS] if train else []
        logits, changed = nn.apply(call, self.module, mutable=mutable)(variables, images, rngs=keys)
        return logits, changed.get(STATISTICS, variables[STATISTICS])


@dataclass(frozen=True)
class NnxNetwork:
    """An nnx module: its structure, into which variables are put."""

    make: Callable[..., Any]
    """Makes the module from `rngs`."""
    graph: Any
    has_type: bool
    root: str = ""

    def init(self, key: Array, images: Array, seed: int) -> Variables:
        """Fresh variables."""
        _, params, statistics, _, _ = _split(self.make(rngs=nnx.Rngs(key)))
        return {PARAMS: _to_dicts(params), STATISTICS: _to_dicts(statistics)}

    def apply(
        self, variables: Variables, images: Array, key: Array | None, *, train: bool
    ) -> tuple[Any, Variables]:
        """Logits, and the statistics afterwards."""
        shapes = nnx.eval_shape(lambda: self.make(rngs=nnx.Rngs(0)))
        _, params, statistics, draws, _ = _split(shapes)
        key = jax.random.key(0) if key is None else key
        module = nnx.merge(
            self.graph,
            _filled(params, variables[PARAMS]),
            _filled(statistics, variables[STATISTICS]),
            _drawing(draws, key),
        )
        # Layers that behave otherwise in training are told so, where the call does not say it.
        module.train() if train else module.eval()
        logits = call_with(module.__call__, (images,), train=train)
        return logits, _to_dicts(nnx.state(module, nnx.BatchStat))


def _split(module: Any) -> tuple[Any, ...]:
    """Structure, parameters, statistics, states of random numbers, and other variables."""
    parts: tuple[Any, ...] = nnx.split(module, nnx.Param, nnx.BatchStat, nnx.RngState, ...)
    return parts


def _to_dicts(state: Any) -> dict[str, Any]:
    """Arrays of a state in nested dicts, whose keys are text also for items of a list."""
    flat = flatten_dict(nnx.to_pure_dict(state))
    return unflatten_dict({tuple(map(str, path)): leaf for path, leaf in flat.items()})


def _filled(state: Any, values: Mapping[str, Any]) -> Any:
    """A state with the values of the same paths."""
    flat = flatten_dict(dict(values))
    own = {path: flat[tuple(map(str, path))] for path in flatten_dict(nnx.to_pure_dict(state))}
    nnx.replace_by_pure_dict(state, unflatten_dict(own))
    return state


def _drawing(state: Any, key: Array) -> Any:
    """States of random numbers at their start, each stream with a key of its own."""

    def start(number: int, shape: Any) -> Array:
        is_key = jnp.issubdtype(shape.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(key, number) if is_key else jnp.zeros(shape.shape, shape.dtype)

    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, [start(*pair) for pair in enumerate(leaves)])
