"""The table of operators: which function of JAX computes each operator of a graph.

A function has the parameters of ATen's schema, in its order. Arrays are `Tensor`; sizes and numbers
are Python's. It returns a `Tensor`, or a tuple of them. A first parameter called `context` gets an
`OperatorContext`. If an operator has many arguments, the arguments after the arrays are fields of a
frozen dataclass, the function's last parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.layers.precision import TypeRule
from pipeline.models.lowerings.problem.image_layout import Layout
from pipeline.models.lowerings.problem.lowering import LoweringPolicy
from pipeline.models.torch_graph.graph import TypeOf
from pipeline.models.torch_graph.tensor import Tensor, align, move_batch_first, to_tensor

Function = TypeVar("Function", bound=Callable[..., Any])

FLOAT_TYPES = ("float32", "float64")
"""Types of the graph that the network's type of activations replaces."""
TYPES: Mapping[str, str] = {
    **{name: name for name in ("bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16")},
    "int64": "int32",
}
"""Other types of the graph, and JAX's type for each."""


@dataclass(frozen=True)
class OperatorContext:
    """Settings of a graph, and of the operators that compute its nodes."""

    dtype: str
    """Type of activations."""
    policy: LoweringPolicy
    layout: Layout
    """Order of axes that images are computed in."""
    key: Callable[[], Array] | None
    """Makes the random key of the step, or of a node; None outside of training."""
    rules: tuple[TypeRule, ...] = ()
    """Nodes that compute in another type, by kind of layer and path of the module."""

    def type_of(self, argument: Any, default: Any = None) -> Any:
        """Return the dtype to compute in for a `TypeOf` of the graph.

        Without one: the default, or the type of activations. Raises ValueError for a type that
        isn't computed.
        """
        if not isinstance(argument, TypeOf):
            return jnp.dtype(self.dtype) if default is None else default
        if argument.name in FLOAT_TYPES:
            return jnp.dtype(self.dtype)
        if argument.name not in TYPES:
            raise ValueError(f"dtype {argument.name} is not computed")
        return jnp.dtype(TYPES[argument.name])

    def to_drawing_order(self, x: Tensor) -> Tensor:
        """Return x in the order that random numbers are drawn in, the same in both layouts."""
        return move_batch_first(x) if self.layout == "chwn" else x

    def draw_key(self) -> Array:
        """Return the random key of this node. Raises ValueError outside of training."""
        if self.key is None:
            raise ValueError("draws random numbers outside of training, where there is no key")
        return self.key()


@dataclass(frozen=True)
class AtenOperator:
    """An operator's function and its properties."""

    function: Callable[..., Any]
    kind: str = ""
    """Kind of layer, for rules of precision by kind; empty for none."""
    draws: bool = False
    """Whether it draws random numbers."""
    full_weights: bool = False
    """Whether it reads weights in float32 for every type of activations: norms compute with them,
    and gradients of biases are summed in float32."""
    settings: type | None = None
    """Data class of the arguments after the arrays, which the last parameter takes."""

    @cached_property
    def signature(self) -> inspect.Signature:
        """Signature of the function."""
        return inspect.signature(self.function)

    @cached_property
    def has_context(self) -> bool:
        """Whether the first parameter is the context."""
        return next(iter(self.signature.parameters), "") == "context"

    def require_signature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError unless the function takes these arguments."""
        self._bind(None, args, kwargs)

    def __call__(self, context: OperatorContext, *args: Any, **kwargs: Any) -> Any:
        """Apply the function. Raises TypeError unless it takes these arguments."""
        bound = self._bind(context, args, kwargs)
        return self.function(*bound.args, **bound.kwargs)

    def _bind(
        self, context: OperatorContext | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> inspect.BoundArguments:
        """Return the arguments of the function, with the settings in their data class."""
        if self.has_context:
            args = (context, *args)
        if self.settings is None:
            return self.signature.bind(*args, **kwargs)
        *arrays, last = self.signature.parameters
        bound = inspect.signature(self.settings).bind(*args[len(arrays) :], **kwargs)
        settings = self.settings(*bound.args, **bound.kwargs)
        return self.signature.bind(*args[: len(arrays)], **{last: settings})


OPERATORS: dict[str, AtenOperator] = {}
"""Every operator by name: `aten.relu.default`, or `sym.mul` for sizes."""


def register(names: Sequence[str], operator: AtenOperator) -> None:
    """Register an operator under ATen's names, such as `relu.default`."""
    for name in names:
        assert f"aten.{name}" not in OPERATORS, f"{name} is registered twice"
        OPERATORS[f"aten.{name}"] = operator


def aten(
    *names: str,
    kind: str = "",
    draws: bool = False,
    full_weights: bool = False,
    settings: type | None = None,
) -> Callable[[Function], Function]:
    """Decorator: register a function for ATen operators such as `relu.default`."""

    def decorate(function: Function) -> Function:
        register(names, AtenOperator(function, kind, draws, full_weights, settings))
        return function

    return decorate


def valuewise(function: Callable[..., Array]) -> Callable[..., Tensor]:
    """Make a function of a `Tensor` from one of an array that computes value by value."""

    def apply(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.with_array(function(x.array, *args, **kwargs))

    return _with_signature(apply, function)


def broadcasting(function: Callable[..., Array]) -> Callable[..., Tensor]:
    """Make a function of `Tensor` arrays and numbers from one whose arguments broadcast."""

    def apply(*operands: Any, **kwargs: Any) -> Tensor:
        arrays, order = align(operands)
        return Tensor(function(*arrays, **kwargs), order)

    return _with_signature(apply, function)


def plain(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Make a function of `Tensor` arrays from one of arrays in PyTorch's order."""

    def apply(*args: Any, **kwargs: Any) -> Tensor:
        return to_tensor(function(*map(_plain, args), **kwargs))

    return _with_signature(apply, function)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.plain()
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _with_signature(
    apply: Callable[..., Tensor], function: Callable[..., Any]
) -> Callable[..., Tensor]:
    """Set the signature that a node's arguments must fit."""
    apply.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return apply


def compute_in_float32(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply a function in float32, and return its result in the type of x."""
    return function(x.astype(jnp.float32)).astype(x.dtype)


def is_float(x: Tensor | Array) -> bool:
    """Return whether an array holds floating-point numbers."""
    return jax.dtypes.issubdtype(x.dtype, jnp.floating)
