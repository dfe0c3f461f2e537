"""Adapters that turn flax modules, of linen or nnx, into pure networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core import meta
from jax import Array

from pipeline.models.imported.calls import (
    call_with,
    list_inputs,
    list_parameters,
    make_with,
    require_callable_with,
)
from pipeline.models.imported.imported_network import (
    PARAMS,
    STATISTICS,
    PureNetwork,
    Variables,
    from_nested_dicts,
    to_nested_dicts,
)


def adapt_module(
    reference: str,
    target: Any,
    arguments: Mapping[str, Any],
    classes: int,
    dtype: str,
    inputs: Sequence[str],
) -> PureNetwork:
    """Return the pure network of a module: `target` itself, or the result of calling `target`.

    Raises ValueError if the module is missing, or can't be called with inputs of these names.
    """
    if isinstance(target, nn.Module):
        if arguments:
            raise ValueError(f"{reference}: is a module; arguments must be {{}}")
        return _adapt_linen(reference, target, inputs, has_dtype=False)
    if isinstance(target, nnx.Module):
        raise ValueError(f"{reference}: is an nnx module; must be a class or a function")
    if not callable(target):
        raise ValueError(f"{reference}: is {target!r}; must be a class, a function or a module")
    has_dtype = "dtype" in list_parameters(target)

    def make(**optional: Any) -> Any:
        return make_with(reference, target, arguments, classes, dtype, **optional)

    if "rngs" in list_parameters(target):
        return _adapt_nnx(reference, make, inputs, has_dtype)
    module = make()
    if isinstance(module, nnx.Module):
        raise ValueError(f"{reference}: makes an nnx module; must have a parameter rngs")
    if not isinstance(module, nn.Module):
        raise ValueError(f"{reference}: makes a {type(module).__name__}; must make a flax module")
    return _adapt_linen(reference, module, inputs, has_dtype)


def find_inputs(target: Any) -> Sequence[str]:
    """Return the names of the inputs in the signature of a module or its class; () for another
    object."""
    if isinstance(target, nn.Module):
        return list_inputs(target.__call__)
    is_class = isinstance(target, type) and issubclass(target, nn.Module | nnx.Module)
    return list_inputs(target.__call__, 1) if is_class else ()


def _adapt_linen(
    reference: str, module: nn.Module, inputs: Sequence[str], has_dtype: bool
) -> PureNetwork:
    require_callable_with(reference, module.__call__, (), inputs=inputs)
    return LinenNetwork(module, has_dtype, type(module).__name__)


def _adapt_nnx(
    reference: str, make: Callable[..., Any], inputs: Sequence[str], has_dtype: bool
) -> PureNetwork:
    abstract = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    if not isinstance(abstract, nnx.Module):
        raise ValueError(f"{reference}: makes a {type(abstract).__name__}; must make an nnx module")
    require_callable_with(reference, abstract.__call__, (), inputs=inputs)
    graph, *_, unsupported = _split_module(abstract)
    if unsupported:
        path, variable = nnx.to_flat_state(unsupported)[0]
        raise ValueError(
            f"{reference}: {'/'.join(map(str, path))} is a {type(variable).__name__}; must be "
            "nnx.Param or nnx.BatchStat"
        )
    return NnxNetwork(make, graph, has_dtype)


@dataclass(frozen=True)
class LinenNetwork:
    """A linen module as a pure network."""

    module: nn.Module
    has_dtype: bool
    root: str
    """Scope of the whole module, which flax names after the class."""

    def init(self, key: Array, inputs: Any, seed: int) -> Variables:
        """Initialise the variables. Raises ValueError unless all are parameters or statistics."""

        def call(module: Any, inputs: Any) -> Any:
            return call_with(module, (), inputs=inputs, train=False)

        variables = meta.unbox(nn.init(call, self.module)(key, inputs))
        unsupported = sorted(set(variables) - {PARAMS, STATISTICS})
        if unsupported:
            raise ValueError(
                f"has variables in the collection {unsupported[0]}; must have only {PARAMS} and "
                f"{STATISTICS}"
            )
        return variables

    def apply(
        self, variables: Variables, inputs: Any, key: Array | None, *, train: bool
    ) -> tuple[Any, Variables]:
        def call(module: Any, inputs: Any) -> Any:
            return call_with(module, (), inputs=inputs, train=train)

        # Other streams, such as stochastic depth's, draw from the key of params.
        keys = {} if key is None else {"dropout": key, PARAMS: jax.random.fold_in(key, 1)}
        mutable = [STATISTICS] if train else []
        logits, changed = nn.apply(call, self.module, mutable=mutable)(variables, inputs, rngs=keys)
        return logits, changed.get(STATISTICS, variables[STATISTICS])


@dataclass(frozen=True)
class NnxNetwork:
    """An nnx module as a pure network. Each call merges its structure with variables."""

    make: Callable[..., Any]
    """Makes the module from `rngs`."""
    graph: Any
    has_dtype: bool
    root: str = ""

    def init(self, key: Array, inputs: Any, seed: int) -> Variables:
        _, params, statistics, _, _ = _split_module(self.make(rngs=nnx.Rngs(key)))
        return {PARAMS: _to_nested_dicts(params), STATISTICS: _to_nested_dicts(statistics)}

    def apply(
        self, variables: Variables, inputs: Any, key: Array | None, *, train: bool
    ) -> tuple[Any, Variables]:
        shapes = nnx.eval_shape(lambda: self.make(rngs=nnx.Rngs(0)))
        _, params, statistics, draws, _ = _split_module(shapes)
        key = jax.random.key(0) if key is None else key
        module = nnx.merge(
            self.graph,
            _fill_state(params, variables[PARAMS]),
            _fill_state(statistics, variables[STATISTICS]),
            _start_streams(draws, key),
        )
        # Some layers read the mode of the module instead of an argument.
        module.train() if train else module.eval()
        logits = call_with(module.__call__, (), inputs=inputs, train=train)
        return logits, _to_nested_dicts(nnx.state(module, nnx.BatchStat))


def _split_module(module: Any) -> tuple[Any, ...]:
    """Split a module into structure, parameters, statistics, random states and other variables."""
    states: tuple[Any, ...] = nnx.split(module, nnx.Param, nnx.BatchStat, nnx.RngState, ...)
    return states


def _to_nested_dicts(state: Any) -> dict[str, Any]:
    return to_nested_dicts(nnx.to_pure_dict(state))


def _fill_state(state: Any, values: Mapping[str, Any]) -> Any:
    """Replace the arrays of a state by the values at their paths, and return the state."""
    nnx.replace_by_pure_dict(state, from_nested_dicts(values, nnx.to_pure_dict(state)))
    return state


def _start_streams(state: Any, key: Array) -> Any:
    """Return the initial random states: counts of 0, and keys folded from `key` by their index."""

    def start(number: int, shape: Any) -> Array:
        is_key = jnp.issubdtype(shape.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(key, number) if is_key else jnp.zeros(shape.shape, shape.dtype)

    leaves, structure = jax.tree.flatten(state)
    started = [start(number, leaf) for number, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, started)
