"""Adapter that turns JAX's functions, which initialise and apply parameters, into pure networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def adapt_functions(
    reference: str,
    target: Any,
    arguments: Mapping[str, Any],
    classes: int,
    dtype: str,
    inputs: Sequence[str],
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
    values: tuple[str, ...] = () if _has_key(initialise) else ("key",)
    init_name = f"{reference}: init"
    require_callable_with(init_name, initialise, values, inputs=inputs, has_key=True)
    has_state = "state" in list_parameters(compute)
    values = ("params", "state") if has_state else ("params",)
    apply_name = f"{reference}: apply"
    require_callable_with(apply_name, compute, values, inputs=inputs, has_key=True)
    return FunctionNetwork(initialise, compute, has_dtype, has_state)


def find_inputs(target: Any) -> Sequence[str]:
    """Return the names of the inputs in the signature of `apply`; () for another object."""
    pair = _as_pair(target)
    if pair is None:
        return ()
    has_state = "state" in list_parameters(pair[1])
    return list_inputs(pair[1], 2 if has_state else 1)


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

    def init(self, key: Array, inputs: Any, seed: int) -> Variables:
        """Initialise the parameters, in nested dicts by their paths in the pytree."""
        parameters, state = self._initialise_variables(key, inputs)
        return {PARAMS: to_nested_dicts(parameters), STATISTICS: to_nested_dicts(state)}

    def apply(
        self, variables: Variables, inputs: Any, key: Array | None, *, train: bool
    ) -> tuple[Any, Variables]:
        """Return the logits, and the state after the call, {} without a state."""
        key = jax.random.key(0) if key is None else key
        one = jax.tree.map(_shape_one, inputs)
        shapes, state_shapes = jax.eval_shape(self._initialise_variables, key, one)
        parameters = from_nested_dicts(variables[PARAMS], shapes)
        if not self.has_state:
            logits = call_with(self.compute, (parameters,), inputs=inputs, train=train, key=key)
            return logits, {}
        state = from_nested_dicts(variables[STATISTICS], state_shapes)
        values = (parameters, state)
        logits, state = call_with(self.compute, values, inputs=inputs, train=train, key=key)
        return logits, to_nested_dicts(state)

    def _initialise_variables(self, key: Array, inputs: Any) -> Any:
        """Return the parameters, and the state, which is {} without a state."""
        values = () if _has_key(self.initialise) else (key,)
        initial = call_with(self.initialise, values, inputs=inputs, train=False, key=key)
        return initial if self.has_state else (initial, {})


def _shape_one(array: Array) -> jax.ShapeDtypeStruct:
    """Return the shape of one sample of a batch, as `init` reads it: floats are float32."""
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return jax.ShapeDtypeStruct((1, *array.shape[1:]), jnp.float32 if is_float else array.dtype)
