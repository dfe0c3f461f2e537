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
    reference: str, target: Any, arguments: Mapping[str, Any], classes: int, dtype: str
) -> PureNetwork:
    """Adapt a module, or make one from a class or a function and adapt that.

    Raises ValueError if it isn't a module, or can't be called with images.
    """
    if isinstance(target, nn.Module):
        if arguments:
            raise ValueError(f"{reference}: is a module already, so that arguments must be {{}}")
        return _adapt_linen(reference, target, has_type=False)
    if isinstance(target, nnx.Module):
        raise ValueError(f"{reference}: is an nnx module already; must be its class or a function")
    if not callable(target):
        raise ValueError(f"{reference}: is no class, function or module, but {target!r}")
    has_type = takes(target, "dtype")

    def make(**optional: Any) -> Any:
        return make_with(reference, target, arguments, classes, dtype, **optional)

    if takes(target, "rngs"):
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
    graph, *_, unsupported = _split_module(abstract)
    if unsupported:
        path, variable = nnx.to_flat_state(unsupported)[0]
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
        """The scope of the module itself, which flax names after its class."""
        return type(self.module).__name__

    def init(self, key: Array, images: Array, seed: int) -> Variables:
        """Initialise the variables. Raises ValueError for collections that training ignores."""

        def call(module: Any, images: Array) -> Any:
            return call_with(module, (images,), train=False)

        variables = meta.unbox(nn.init(call, self.module)(key, images))
        unsupported = sorted(set(variables) - {PARAMS, STATISTICS})
        if unsupported:
            raise ValueError(
                f"has variables in the collection {unsupported[0]}; training carries {PARAMS} and "
                f"{STATISTICS} alone"
            )
        return variables

    def apply(
        self, variables: Variables, images: Array, key: Array | None, *, train: bool
    ) -> tuple[Any, Variables]:
        """Compute the logits, and the statistics after this call."""

        def call(module: Any, images: Array) -> Any:
            return call_with(module, (images,), train=train)

        # Streams without a key, such as stochastic depth's, draw from the key of params.
        keys = {} if key is None else {"dropout": key, PARAMS: jax.random.fold_in(key, 1)}
        mutable = [STATISTICS] if train else []
        logits, changed = nn.apply(call, self.module, mutable=mutable)(variables, images, rngs=keys)
        return logits, changed.get(STATISTICS, variables[STATISTICS])


@dataclass(frozen=True)
class NnxNetwork:
    """An nnx module as its structure, merged with variables in each call."""

    make: Callable[..., Any]
    """Makes the module from `rngs`."""
    graph: Any
    has_type: bool
    root: str = ""

    def init(self, key: Array, images: Array, seed: int) -> Variables:
        """Initialise the variables."""
        _, params, statistics, _, _ = _split_module(self.make(rngs=nnx.Rngs(key)))
        return {PARAMS: _to_dicts(params), STATISTICS: _to_dicts(statistics)}

    def apply(
        self, variables: Variables, images: Array, key: Array | None, *, train: bool
    ) -> tuple[Any, Variables]:
        """Compute the logits, and the statistics after this call."""
        shapes = nnx.eval_shape(lambda: self.make(rngs=nnx.Rngs(0)))
        _, params, statistics, draws, _ = _split_module(shapes)
        key = jax.random.key(0) if key is None else key
        module = nnx.merge(
            self.graph,
            _fill(params, variables[PARAMS]),
            _fill(statistics, variables[STATISTICS]),
            _start_streams(draws, key),
        )
        # For layers that read the mode of the module instead of an argument.
        module.train() if train else module.eval()
        logits = call_with(module.__call__, (images,), train=train)
        return logits, _to_dicts(nnx.state(module, nnx.BatchStat))


def _split_module(module: Any) -> tuple[Any, ...]:
    """Split into structure, parameters, statistics, random states and other variables."""
    states: tuple[Any, ...] = nnx.split(module, nnx.Param, nnx.BatchStat, nnx.RngState, ...)
    return states


def _to_dicts(state: Any) -> dict[str, Any]:
    """Nested dicts of the arrays of a state. Keys are text, also for items of lists."""
    flat = flatten_dict(nnx.to_pure_dict(state))
    return unflatten_dict({tuple(map(str, path)): leaf for path, leaf in flat.items()})


def _fill(state: Any, values: Mapping[str, Any]) -> Any:
    """Put the values into a state by their paths, and return it."""
    flat = flatten_dict(dict(values))
    paths = flatten_dict(nnx.to_pure_dict(state))
    filled = {path: flat[tuple(map(str, path))] for path in paths}
    nnx.replace_by_pure_dict(state, unflatten_dict(filled))
    return state


def _start_streams(state: Any, key: Array) -> Any:
    """Random states at their start. The keys of streams are folded from `key` by number."""

    def start(number: int, shape: Any) -> Array:
        is_key = jnp.issubdtype(shape.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(key, number) if is_key else jnp.zeros(shape.shape, shape.dtype)

    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(
        structure, [start(number, leaf) for number, leaf in enumerate(leaves)]
    )
