"""The table of operators: the function that computes each operator of a graph by JAX.

A function has the parameters of ATen's schema, in its order: `TorchTensor`s, and sizes and numbers
of Python. It returns a `TorchTensor`, or a tuple of them, and raises ValueError for arguments that
it can't compute. Its first parameter may be `context`, an `OperatorContext`. If an operator has
many arguments, the function's last parameter is a frozen dataclass of those after the tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.layers.precision import TypeRule
from pipeline.models.lowerings.problem.conv_window import Layout
from pipeline.models.lowerings.problem.lowering import LoweringPolicy
from pipeline.models.torch_graph.graph import TypeOf
from pipeline.models.torch_graph.tensor import TorchTensor, align, move_batch_first, to_tensor

Function = TypeVar("Function", bound=Callable[..., Any])

FLOAT_TYPES = ("float32", "float64")
"""Dtypes of a graph that are computed in the network's dtype of activations."""
TYPES: Mapping[str, str] = {
    **{name: name for name in ("bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16")},
    "int64": "int32",
    **dict.fromkeys(("complex32", "complex64", "complex128"), "complex64"),
}
"""JAX's dtype for each other dtype of a graph."""


# fmt: off
ARGUMENT_ERRORS = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError,
)
# fmt: on
"""Errors that an operator may raise for arguments that it can't compute."""


@dataclass(frozen=True)
class OperatorContext:
    """Settings for the computation of operators."""

    dtype: str
    """Dtype of activations."""
    policy: LoweringPolicy
    layout: Layout
    """Order of the axes of images."""
    key: Callable[[], Array] | None
    """Makes a random key: in a network's context the key of the step, in an operator's context the
    key of the node. None outside of training."""
    rules: tuple[TypeRule, ...] = ()
    """Rules for nodes with another dtype, by kind of layer and path of the module."""

    def type_of(self, argument: Any, default: Any = None) -> Any:
        """Return the JAX dtype that a `TypeOf` names. Raises ValueError for an unsupported dtype.

        For any other argument return `default`, or the dtype of activations if `default` is None.
        """
        if not isinstance(argument, TypeOf):
            return jnp.dtype(self.dtype) if default is None else default
        if argument.name in FLOAT_TYPES:
            return jnp.dtype(self.dtype)
        if argument.name not in TYPES:
            raise ValueError(f"dtype {argument.name} isn't supported")
        return jnp.dtype(TYPES[argument.name])

    def to_drawing_order(self, x: TorchTensor) -> TorchTensor:
        """Return x in the order in which random numbers are drawn, the same in both layouts."""
        return move_batch_first(x) if self.layout == "chwn" else x

    def draw_key(self) -> Array:
        """Return the random key of the node, in training."""
        assert self.key is not None, "graphs that draw in evaluation are refused"
        return self.key()


@dataclass(frozen=True)
class AtenOperator:
    """An operator's function and its properties."""

    function: Callable[..., Any]
    kind: str = ""
    """Kind of layer that rules of precision name; empty for none."""
    draws: bool = False
    """Whether the function draws random numbers."""
    full_weights: bool = False
    """Whether weights are passed in float32 whatever the dtype of activations. Norms compute in
    float32. Convolutions and dense layers cast the kernel but not the bias, so that the gradient of
    the bias is summed in float32."""
    settings: Callable[..., Any] | None = None
    """Makes the last parameter, a dataclass, from the arguments after the tensors."""

    @cached_property
    def signature(self) -> inspect.Signature:
        """Signature of the function."""
        return inspect.signature(self.function)

    def __call__(self, context: OperatorContext, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Raises TypeError unless it accepts these arguments."""
        bound = self.bind(context, args, kwargs)
        return self.function(*bound.args, **bound.kwargs)

    def bind(
        self, context: OperatorContext | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> inspect.BoundArguments:
        """Return the arguments of the function, with the settings in their dataclass.

        Raises TypeError unless the function accepts them.
        """
        if next(iter(self.signature.parameters), "") == "context":
            args = (context, *args)
        if self.settings is None:
            return self.signature.bind(*args, **kwargs)
        *tensor_names, settings_name = self.signature.parameters
        num_tensors = len(tensor_names)
        bound = inspect.signature(self.settings).bind(*args[num_tensors:], **kwargs)
        settings = self.settings(*bound.args, **bound.kwargs)
        return self.signature.bind(*args[:num_tensors], **{settings_name: settings})


OPERATORS: dict[str, AtenOperator] = {}
"""Every operator by name: `aten.relu.default`, or `sym.mul` for sizes."""


def aten(
    *names: str,
    kind: str = "",
    draws: bool = False,
    full_weights: bool = False,
    settings: Callable[..., Any] | None = None,
    library: str = "aten",
) -> Callable[[Function], Function]:
    """Return a decorator that registers a function for operators such as `relu.default`, of ATen or
    of another library."""

    def decorate(function: Function) -> Function:
        operator = AtenOperator(function, kind, draws, full_weights, settings)
        for name in names:
            assert f"{library}.{name}" not in OPERATORS, f"{name} is registered twice"
            OPERATORS[f"{library}.{name}"] = operator
        return function

    return decorate


def valuewise(function: Callable[..., Array]) -> Callable[..., TorchTensor]:
    """Return a function of a `TorchTensor` that applies an elementwise function of an array."""

    @wraps(function)
    def apply(x: TorchTensor, *args: Any, **kwargs: Any) -> TorchTensor:
        return x.with_array(function(x.array, *args, **kwargs))

    return apply


def broadcasting(function: Callable[..., Array]) -> Callable[..., TorchTensor]:
    """Return a function of `TorchTensor`s and numbers that applies a broadcasting function."""

    @wraps(function)
    def apply(*operands: Any, **kwargs: Any) -> TorchTensor:
        arrays, order = align(operands)
        return TorchTensor(function(*arrays, **kwargs), order)

    return apply


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `TorchTensor`s that applies a function of arrays in PyTorch's order.

    If that returns a tuple, so does this, with None for None.
    """

    @wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        operands = jax.tree.map(_to_plain, (args, kwargs), is_leaf=_is_tensor)
        result = function(*operands[0], **operands[1])
        if isinstance(result, tuple):
            return tuple(None if array is None else to_tensor(array) for array in result)
        return to_tensor(result)

    return apply


def _is_tensor(value: Any) -> bool:
    return isinstance(value, TorchTensor)


def _to_plain(value: Any) -> Any:
    return value.plain() if isinstance(value, TorchTensor) else value


def pack_result(function: Callable[..., Any]) -> Callable[..., tuple[Any]]:
    """Return a function whose result is alone in a tuple.

    It is for operators with more results, such as statistics, that no network reads.
    """

    @wraps(function)
    def apply(*args: Any, **kwargs: Any) -> tuple[Any]:
        return (function(*args, **kwargs),)

    return apply


def compute_in_float32(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply a function in float32, and return its result in the dtype of x."""
    return function(x.astype(jnp.float32)).astype(x.dtype)


def cast_array(array: Array, dtype: Any, *, is_int64: bool = False) -> Array:
    """Cast an array as torch and ONNX Runtime do on a CPU, where JAX saturates.

    A float becomes int32, of which int8, int16 and uint8 have the last bits: -1.5 becomes 255 in
    uint8. What int32 can't hold, and NaN, becomes the lowest int32. Floats to int64
    (`is_int64`), which is int32 here, saturate within int64.
    """
    dtype = jnp.dtype(dtype)
    is_cut = jnp.issubdtype(dtype, jnp.integer) and is_float(array)
    if not is_cut:
        return array.astype(dtype)
    info = jnp.iinfo(jnp.int32)
    wide = array.astype(jnp.float32)
    limit = 2.0**63 if is_int64 else 2.0**31
    # Comparisons with NaN are false.
    is_held = (wide >= -limit) & (wide < limit)
    return jnp.where(is_held, wide.astype(jnp.int32), info.min).astype(dtype)


def is_float(x: TorchTensor | Array) -> bool:
    """Return whether an array has floating-point numbers."""
    return jax.dtypes.issubdtype(x.dtype, jnp.floating)
