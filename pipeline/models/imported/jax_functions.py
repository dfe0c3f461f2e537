"""Adapter that turns JAX's functions, which initialise and apply parameters, into pure networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import Array

from pipeline.models.imported.calls import (
    KEYS,
    call_with,
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


def adapt_functions(
    reference: str, target: Any, arguments: Mapping[str, Any], classes: int, dtype: str
) -> PureNetwork:
    """Return the pure network of a pair (init, apply), or of an object with both.

    `target` is the pair or the object, or a function that returns one of them for `arguments`.
    Raises ValueError for other objects.
    """
    pair = _as_pair(target)
    has_dtype = False
    if pair is None:
        if not callable(target):
            raise ValueError(
                f"{reference}: is neither a function nor an object with init and apply"
            )
        result = make_with(reference, target, arguments, classes, dtype)
        if isinstance(result, nn.Module | nnx.Module):
            raise ValueError(f"{reference}: is a flax module; must be used by model=flax")
        pair = _as_pair(result)
        has_dtype = "dtype" in list_parameters(target)
    elif arguments:
        raise ValueError(f"{reference}: has init and apply; arguments must be {{}}")
    if pair is None:
        raise ValueError(
            f"{reference}: must return (init, apply) or an object with these: init(key, images) "
            "returns parameters, apply(params, images) returns logits"
        )
    initialise, compute = pair
    values = ("images",) if _has_key(initialise) else ("key", "images")
    require_callable_with(f"{reference}: init", initialise, values, has_key=True)
    has_state = "state" in list_parameters(compute)
    inputs = ("params", "state", "images") if has_state else ("params", "images")
    require_callable_with(f"{reference}: apply", compute, inputs, has_key=True)
    return FunctionNetwork(initialise, compute, has_dtype, has_state)


def _as_pair(value: Any) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return init and apply, or None if the value is neither a pair nor an object with them."""
    if hasattr(value, "init") and hasattr(value, "apply") and not isinstance(value, type):
        return value.init, value.apply
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(map(callable, value))
    return (value[0], value[1]) if is_pair else None


def _has_key(function: Callable[..., Any]) -> bool:
    return not set(KEYS).isdisjoint(list_parameters(function))


@dataclass(frozen=True)
class FunctionNetwork:
    """Functions `init(key, images)` and `apply(params, images)`.

    With a state, `init` returns (params, state), and `apply(params, state, images)` returns
    (logits, state), like the functions of `haiku.transform_with_state`. The state is stored as
    batch statistics.
    """

    initialise: Callable[..., Any]
    compute: Callable[..., Any]
    has_dtype: bool
    has_state: bool = False
    root: str = ""

    def init(self, key: Array, images: Array, seed: int) -> Variables:
        """Initialise the parameters, in nested dicts by their paths in the pytree."""
        parameters, state = self._initialise_variables(key, images)
        return {PARAMS: to_nested_dicts(parameters), STATISTICS: to_nested_dicts(state)}

    def apply(
        self, variables: Variables, images: Array, key: Array | None, *, train: bool
    ) -> tuple[Any, Variables]:
        """Return the logits, and the state after the call, {} without a state."""
        key = jax.random.key(0) if key is None else key
        image_shape = jax.ShapeDtypeStruct((1, *images.shape[1:]), jnp.float32)
        shapes, state_shapes = jax.eval_shape(self._initialise_variables, key, image_shape)
        parameters = from_nested_dicts(variables[PARAMS], shapes)
        if not self.has_state:
            return call_with(self.compute, (parameters, images), train=train, key=key), {}
        state = from_nested_dicts(variables[STATISTICS], state_shapes)
        logits, state = call_with(self.compute, (parameters, state, images), train=train, key=key)
        return logits, to_nested_dicts(state)

    def _initialise_variables(self, key: Array, images: Array) -> Any:
        """Return the parameters, and the state, which is {} without a state."""
        values = (images,) if _has_key(self.initialise) else (key, images)
        initial = call_with(self.initialise, values, train=False, key=key)
        return initial if self.has_state else (initial, {})
