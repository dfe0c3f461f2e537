"""The table of operators: the function that computes each operator of a graph by JAX.

A function has the parameters of ATen's schema, in its order: `TorchTensor`s, and sizes and numbers
of Python. It returns a `TorchTensor`, or a tuple of them, and raises ValueError for arguments that
it can't compute. Its first parameter may be `context`, an `OperatorContext`. If an operator has
many arguments, the function's last parameter is a frozen dataclass of those after the tensors.

PyTorch's tensors as arrays of JAX, whose axes may be in another order.

PyTorch's images are NCHW, but convolutions are faster in NHWC. A `TorchTensor` stores which axis of
PyTorch's tensor each axis of its array is. So a permutation moves no data, elementwise operators
compute in any order, and only an operator that needs another order transposes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from operator import itemgetter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.layers.precision import TypeRule
from pipeline.models.lowerings.problem import Layout, LoweringPolicy
from pipeline.models.torch_graph.graph import TypeOf

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
NHWC = (0, 2, 3, 1)
"""Order of the axes of images, as axes of PyTorch's NCHW."""
CHWN = (1, 2, 3, 0)
"""Order with the batch last, so that the values of a vector register are of different samples."""
IMAGE_ORDERS: Mapping[Layout, tuple[int, ...]] = {"nhwc": NHWC, "chwn": CHWN}
"""Orders by the layout of a network. In both, axes 1 and 2 are height and width."""


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


@dataclass(frozen=True)
class TorchTensor:
    """An array, and PyTorch's number of each of its axes."""

    array: Array
    order: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.order)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in PyTorch's order."""
        sizes = dict(zip(self.order, self.array.shape, strict=True))
        return tuple(sizes[axis] for axis in range(self.ndim))

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def axis(self, number: int) -> int:
        """Return the index in `array` of PyTorch's axis. Raises ValueError if it is missing."""
        if not -self.ndim <= number < max(self.ndim, 1):
            raise ValueError(f"axis {number} of an array with {self.ndim} axes")
        return self.order.index(number % self.ndim)

    def axes(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the indices in `array` of PyTorch's axes."""
        return tuple(self.axis(number) for number in numbers)

    def transpose(self, order: Sequence[int]) -> Array:
        """Return the array with its axes in another order."""
        if tuple(order) == self.order:
            return self.array
        return jnp.transpose(self.array, [self.order.index(number) for number in order])

    def plain(self) -> Array:
        """Return the array with its axes in PyTorch's order."""
        return self.transpose(range(self.ndim))

    def with_array(self, array: Array) -> TorchTensor:
        """Return a tensor of another array in the same order."""
        return TorchTensor(array, self.order)


def to_tensor(array: Any) -> TorchTensor:
    """Return an array in PyTorch's order as a tensor."""
    array = jnp.asarray(array)
    return TorchTensor(array, tuple(range(array.ndim)))


def choose_image_order(x: TorchTensor) -> tuple[int, ...]:
    """Return the order in which images are computed: CHWN if they have it, else NHWC."""
    return CHWN if x.order == CHWN else NHWC


def move_batch_first(x: TorchTensor) -> TorchTensor:
    """Swap the batch, if it is the last axis, with the first axis."""
    if x.ndim < 2 or x.order[-1] != 0:
        return x
    order = (0, *x.order[1:-1], x.order[0])
    return TorchTensor(x.transpose(order), order)


def permute_axes(x: TorchTensor, numbers: Sequence[int]) -> TorchTensor:
    """Permute the axes, as `torch.permute`; no data is moved."""
    numbers = [x.order[x.axis(number)] for number in numbers]
    if sorted(numbers) != list(range(x.ndim)):
        raise ValueError(f"{tuple(numbers)} must be a permutation of {x.ndim} axes")
    return TorchTensor(x.array, tuple(numbers.index(number) for number in x.order))


def drop_axes(x: TorchTensor, removed: Sequence[int], array: Array) -> TorchTensor:
    """Return `array` as a tensor; its axes are x's without PyTorch's axes `removed`."""
    remaining = [number for number in x.order if number not in removed]
    order = (number - sum(axis < number for axis in removed) for number in remaining)
    return TorchTensor(array, tuple(order))


def align(operands: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return the arrays of operands that broadcast against each other, and their common order.

    Of the tensors with the most axes, the largest one determines the order. Numbers are returned
    unchanged.
    """
    tensors = [operand for operand in operands if isinstance(operand, TorchTensor)]
    if not tensors:
        return list(operands), ()
    ndim = max(tensor.ndim for tensor in tensors)
    order = max((tensor for tensor in tensors if tensor.ndim == ndim), key=count_values).order
    return [_add_axes(x, ndim, order) if isinstance(x, TorchTensor) else x for x in operands], order


def count_values(x: TorchTensor) -> int:
    """Return the number of values; a size that is unknown during an export counts as 2."""
    return math.prod(size if isinstance(size, int) else 2 for size in x.shape)


def _add_axes(x: TorchTensor, ndim: int, order: tuple[int, ...]) -> Array:
    """Return the array of x with `ndim` axes in an order; new leading axes have size 1."""
    if x.ndim == 0 or x.order == order:
        return x.array
    shape = (1,) * (ndim - x.ndim) + x.shape
    num_long_axes = sum(not (isinstance(size, int) and size == 1) for size in shape)
    if num_long_axes <= 1:
        # The values have the same sequence in every order of the axes.
        return x.array.reshape([shape[number] for number in order])
    return jnp.transpose(x.plain().reshape(shape), order)


def reshape_axes(x: TorchTensor, shape: Sequence[int]) -> TorchTensor:
    """Reshape as `torch.reshape` does.

    No data is transposed if the axes that are merged or split are adjacent in x and in PyTorch's
    order. Raises ValueError if x has another number of values than `shape`.
    """
    if not all(isinstance(size, int) for size in (*x.shape, *shape)):
        # The batch size is unknown while a program is exported.
        return to_tensor(x.plain().reshape(tuple(shape)))
    shape = _infer_shape(x.shape, tuple(shape))
    if 0 not in shape and x.order != tuple(range(x.ndim)):
        reshaped = _reshape_without_transpose(x, shape)
        if reshaped is not None:
            return reshaped
    return to_tensor(x.plain().reshape(shape))


def _infer_shape(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Return the new shape with -1 replaced. Raises ValueError unless the products are equal."""
    num_values = math.prod(old)
    product = math.prod(size for size in new if size != -1)
    if new.count(-1) == 1 and product > 0 and num_values % product == 0:
        new = tuple(num_values // product if size == -1 else size for size in new)
    if min(new, default=1) < 0 or math.prod(new) != num_values:
        raise ValueError(f"shape {old} can't become {new}")
    return new


def _group_axes(
    old: tuple[int, ...], new: tuple[int, ...]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of old axes and of the new axes with the same values, in order.

    No group has old axes of size 1. The shapes are without 0 and of equal products.
    """
    old_axes = [axis for axis, size in enumerate(old) if size != 1]
    new_axes = list(range(len(new)))
    while old_axes or new_axes:
        old_group: list[int] = []
        new_group: list[int] = []
        old_size = 1
        new_size = 1
        while old_size != new_size or not new_group:
            if old_size < new_size:
                old_group.append(old_axes.pop(0))
                old_size *= old[old_group[-1]]
            else:
                new_group.append(new_axes.pop(0))
                new_size *= new[new_group[-1]]
        yield old_group, new_group


def _reshape_without_transpose(x: TorchTensor, shape: tuple[int, ...]) -> TorchTensor | None:
    """Return the reshaped tensor if each group's old axes are adjacent in x, else None."""
    old_order = [number for number in x.order if x.shape[number] != 1]
    new_axes_by_start: list[tuple[int, list[int]]] = []
    for old_axes, new_axes in _group_axes(x.shape, shape):
        # Groups without old axes, which have size 1, come first.
        start = old_order.index(old_axes[0]) if old_axes else -1
        if old_axes and old_order[start : start + len(old_axes)] != old_axes:
            return None
        new_axes_by_start.append((start, new_axes))
    new_axes_by_start.sort(key=itemgetter(0))
    order = [axis for _, new_axes in new_axes_by_start for axis in new_axes]
    return TorchTensor(x.array.reshape([shape[axis] for axis in order]), tuple(order))
