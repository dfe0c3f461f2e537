"""Builder of a graph's nodes from ONNX, and the reading of ONNX's nodes.

It computes all shapes, and the nodes that read constants. A node's inputs and attributes are read
by the functions that translate operators.

An ONNX file needn't have shapes. So the shape of every value is computed at two batch sizes. A size
that differs between them is taken as linear in the batch, and nodes of the graph compute it.
Another two batch sizes show whether it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.models.lowerings.problem import DEFAULTS
from pipeline.models.torch_graph.graph import ArrayOf, GraphNode, TensorSpec, ValueOf
from pipeline.models.torch_graph.onnx.onnx_file import OnnxNode
from pipeline.models.torch_graph.operator_table import OperatorContext, TorchTensor, to_tensor
from pipeline.models.torch_graph.operators.known_operators import find_operator

MAX_ELEMENTS = 2**31
"""Most values of a result at either batch size."""
MAX_CONSTANTS = 2**26
"""Most values of all computed constants together."""
_INT32 = np.iinfo(np.int32)
TRAINING = object()
"""An argument that is true in the form for training and false in the form for evaluation."""


@dataclass(frozen=True)
class BatchSize:
    """A size that is linear in the batch."""

    per_sample: int
    constant: int


Length = int | BatchSize
BATCH = BatchSize(1, 0)


@dataclass(frozen=True, eq=False)
class OnnxValue:
    """A tensor of the network at both batch sizes."""

    reference: ValueOf | ArrayOf | None
    """The node or weight that it is in the graph; None for a constant."""
    arrays: tuple[Any, ...]
    """The tensor at each batch size: an array of numpy for a constant, else traced by JAX."""

    @property
    def is_constant(self) -> bool:
        """Whether it depends neither on the values of the network's input nor on weights."""
        return self.reference is None

    @property
    def ndim(self) -> int:
        return len(self.arrays[0].shape)

    @property
    def dtype(self) -> str:
        return str(self.arrays[0].dtype)

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))

    def is_number(self) -> bool:
        """Return whether it is a constant without axes that doesn't depend on the batch."""
        return self.is_constant and self.ndim == 0 and self.is_fixed()

    def is_fixed(self) -> bool:
        """Return whether a constant doesn't depend on the batch."""
        first, second = self.arrays
        return first is second or np.array_equal(first, second, equal_nan=self.is_float)


Argument = Any
"""An `OnnxValue`, a `BatchSize`, `TRAINING`, a `TypeOf`, a number, text or None, or a tuple."""


@dataclass
class TorchGraphBuilder:
    """The nodes and arrays of a graph, to which calls add.

    Its methods are called inside `jax.eval_shape`, so only shapes are computed.
    """

    batches: tuple[int, int]
    """The batch sizes at which shapes are computed; equal if the network has only one."""
    weights: dict[str, np.ndarray]
    """Parameters and statistics by their names in the graph, in PyTorch's order of axes."""
    first_input: ValueOf
    """Reference to the first input. All inputs have its batch size."""
    declared_batch: int | None
    """The batch size of the file's input; None if it is open."""
    nodes: list[GraphNode] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    module: str = ""
    """Module of the nodes that are added next."""
    kind: str = ""
    """ONNX operator of the nodes that are added next."""
    line: str = ""
    """Description of the ONNX node, for messages about the nodes that are added next."""
    _sizes: dict[BatchSize, ValueOf] = field(default_factory=dict)
    _stored: dict[int, tuple[np.ndarray, ArrayOf]] = field(default_factory=dict)
    """Constants that nodes read, and references to them, by the identity of the arrays."""
    _num_folded_values: int = 0
    """Number of values of all computed constants."""

    @property
    def sizes(self) -> frozenset[BatchSize]:
        """Sizes that nodes compute from the batch."""
        return frozenset(self._sizes)

    def input(self, spec: TensorSpec, reference: ValueOf) -> OnnxValue:
        """Return an input of the network."""
        shapes = [(batch, *(size or 0 for size in spec.shape[1:])) for batch in self.batches]
        dtype = "float32" if spec.dtype.startswith("float") else "int32"
        return OnnxValue(reference, tuple(to_tensor(jnp.zeros(shape, dtype)) for shape in shapes))

    def weight(self, name: str) -> OnnxValue:
        """Return a parameter or a statistic."""
        array = to_tensor(jnp.zeros(self.weights[name].shape))
        return OnnxValue(ArrayOf(name), (array, array))

    def constant(self, array: Any) -> OnnxValue:
        """Return an array as a constant at both batch sizes; floats become float32."""
        array = np.asarray(array)
        if array.dtype.name in ("float64", "float16", "bfloat16"):
            array = array.astype(np.float32)
        return OnnxValue(None, (array, array))

    def shape(self, value: OnnxValue) -> tuple[Length, ...]:
        """Return the shape of a value."""
        first, second = (array.shape for array in value.arrays)
        return tuple(map(self.size, first, second))

    def fixed_shape(self, value: OnnxValue, first_axis: int = 0) -> tuple[int, ...]:
        """Return the sizes from an axis on. Raises ValueError if one depends on the batch."""
        sizes = self.shape(value)[first_axis:]
        return _require_fixed(sizes, "a size of its input depends on the batch; must be fixed")

    def transpose_weight(self, name: str) -> OnnxValue:
        """Transpose a stored matrix of weights, and return it. No other node may read it."""
        self.weights[name] = np.ascontiguousarray(self.weights[name].T)
        return self.weight(name)

    def keep_batch_open(self, value: OnnxValue, shape: Sequence[Length]) -> tuple[Length, ...]:
        """Return the shape to which `value` is reshaped, with the batch as its first size.

        A file that was exported for one batch size has that size there. It is replaced if the first
        size of `value` is the batch; else the shape is returned as it is.
        """
        is_fixed = bool(shape) and shape[0] == self.declared_batch
        if is_fixed and self.shape(value)[:1] == (BATCH,):
            return (BATCH, *shape[1:])
        return tuple(shape)

    def repeat_for_batch(self, value: OnnxValue) -> OnnxValue:
        """Repeat a value of one sample for the batch, if the file is for a batch of one sample."""
        sizes = self.shape(value)
        if sizes[0] != 1 or self.declared_batch != 1:
            return value
        return self.call("expand.default", value, (BATCH, *sizes[1:]))

    def size(self, first: int, second: int) -> Length:
        """Return the size that is `first` and `second` at the two batch sizes.

        Raises ValueError if no whole numbers make it linear in the batch.
        """
        if first == second:
            return first
        low, high = self.batches
        per_sample, remainder = divmod(second - first, high - low)
        if remainder:
            raise ValueError(f"sizes {first} and {second}, which aren't linear in the batch size")
        return BatchSize(per_sample, first - per_sample * low)

    def integers(self, value: OnnxValue) -> tuple[Length, ...]:
        """Return the whole numbers of a constant. Raises ValueError for another value."""
        if not value.is_constant:
            raise ValueError("a shape or an axis depends on the values of the network's input")
        if value.ndim > 1 or value.is_float:
            raise ValueError(f"a shape or an axis is {value.dtype} of {value.ndim} axes")
        first, second = (np.atleast_1d(array).tolist() for array in value.arrays)
        return tuple(map(self.size, first, second))

    def fixed_integers(self, value: OnnxValue) -> tuple[int, ...]:
        """Return whole numbers that don't depend on the batch. Raises ValueError for others."""
        numbers = self.integers(value)
        return _require_fixed(numbers, "a number depends on the batch size; must be fixed")

    def call(self, op: str, *args: Argument, **kwargs: Argument) -> OnnxValue:
        """Add a node such as `relu.default`, and return its first result."""
        return self.call_all(op, *args, **kwargs)[0]

    def call_all(self, op: str, *args: Argument, **kwargs: Argument) -> tuple[OnnxValue, ...]:
        """Add a node, and return its results. If it reads only constants, compute it instead."""
        leaves = jax.tree.leaves((args, kwargs))
        values = [leaf for leaf in leaves if isinstance(leaf, OnnxValue)]
        has_size = any(isinstance(leaf, BatchSize) for leaf in leaves)
        number = len(self.nodes) + 1
        name = f"{re.sub(r'[^a-z0-9]', '_', self.kind.lower())}_{number}"
        named = tuple(kwargs.items())
        node = GraphNode(name, f"aten.{op}", args, named, (), self.module, self.kind, self.line)
        if all(value.is_constant for value in values) and not has_size:
            return self._fold(node, is_fixed=all(map(OnnxValue.is_fixed, values)))
        first = self._compute(node, 0)
        second = self._compute(node, 1)
        has_several = isinstance(first, tuple)
        results = list(zip(first, second, strict=True)) if has_several else [(first, second)]
        node = replace(
            node,
            args=jax.tree.map(self._refer, args),
            kwargs=jax.tree.map(self._refer, named),
            results=tuple(_make_spec(first, second) for first, second in results),
        )
        self.nodes.append(node)
        return tuple(
            OnnxValue(ValueOf(name, item if has_several else None), arrays)
            for item, arrays in enumerate(results)
        )

    def _compute(self, node: GraphNode, batch_index: int, *, folds: bool = False) -> Any:
        """Return the result of a node, a tensor or a tuple of them, at a batch size.

        Constant numbers are passed as Python's numbers unless `folds`.
        """
        context = OperatorContext("float32", DEFAULTS, "nhwc", None)

        def read_argument(argument: Argument) -> Any:
            match argument:
                case OnnxValue(is_constant=True):
                    array = argument.arrays[batch_index]
                    is_number = argument.is_number() and not folds
                    return array.item() if is_number else to_tensor(_with_32_bits(array))
                case OnnxValue():
                    return argument.arrays[batch_index]
                case BatchSize():
                    return argument.per_sample * self.batches[batch_index] + argument.constant
            return False if argument is TRAINING else argument

        args, kwargs = jax.tree.map(read_argument, (node.args, dict(node.kwargs)))
        return find_operator(node)(context, *args, **kwargs)

    def _fold(self, node: GraphNode, is_fixed: bool) -> tuple[OnnxValue, ...]:
        """Return the results of a node that reads only constants, as constants."""

        def compute(batch_index: int) -> tuple[Array, ...]:
            result = self._compute(node, batch_index, folds=True)
            results = result if isinstance(result, tuple) else (result,)
            return tuple(x.plain() for x in results)

        # From constants that don't depend on the batch, one array is for both batch sizes.
        folded = []
        for batch_index in (0,) if is_fixed else (0, 1):
            shapes = jax.eval_shape(partial(compute, batch_index))
            self._num_folded_values += sum(math.prod(x.shape) for x in shapes)
            if self._num_folded_values > MAX_CONSTANTS:
                raise ValueError(f"its constants have more than {MAX_CONSTANTS:,} values")
            with jax.ensure_compile_time_eval():
                folded.append(tuple(map(np.asarray, compute(batch_index))))
        return tuple(OnnxValue(None, arrays) for arrays in zip(folded[0], folded[-1], strict=True))

    def _refer(self, argument: Argument) -> Any:
        """Return an argument as a node of the graph stores it."""
        match argument:
            case OnnxValue(reference=None) if argument.is_number():
                return argument.arrays[0].item()
            case OnnxValue(reference=None):
                return self._store(argument)
            case OnnxValue():
                return argument.reference
            case BatchSize():
                return self._size_node(argument)
        return argument

    def _store(self, value: OnnxValue) -> ArrayOf:
        """Store a constant among the graph's arrays, once, and return a reference to it."""
        if not value.is_fixed():
            raise ValueError("a tensor is made from the batch size in a way that isn't known here")
        array = value.arrays[0]
        if id(array) not in self._stored:
            name = f"constant@{len(self.constants) + 1}"
            self.constants[name] = np.asarray(_with_32_bits(array))
            self._stored[id(array)] = (array, ArrayOf(name))
        _, reference = self._stored[id(array)]
        return reference

    def _size_node(self, size: BatchSize) -> ValueOf:
        """Return a reference to the node that computes a size, which is added if it is missing."""
        if size not in self._sizes:
            if size == BATCH:
                node = self._append_size("aten.sym_size.int", self.first_input, 0)
            elif size.constant:
                scaled = self._size_node(BatchSize(size.per_sample, 0))
                node = self._append_size("sym.add", scaled, size.constant)
            else:
                node = self._append_size("sym.mul", self._size_node(BATCH), size.per_sample)
            self._sizes[size] = node
        return self._sizes[size]

    def _append_size(self, op: str, *args: Any) -> ValueOf:
        name = f"size_{len(self.nodes) + 1}"
        self.nodes.append(GraphNode(name, op, args, (), (), self.module, self.kind, self.line))
        return ValueOf(name)


def _require_fixed(numbers: Sequence[Length], problem: str) -> tuple[int, ...]:
    """Return the numbers. Raises ValueError with the problem if one depends on the batch."""
    fixed = tuple(number for number in numbers if isinstance(number, int))
    if len(fixed) < len(numbers):
        raise ValueError(problem)
    return fixed


def _make_spec(first: TorchTensor, second: TorchTensor) -> TensorSpec:
    """Return the spec of a result by its tensors at both batch sizes."""
    if max(math.prod(first.shape), math.prod(second.shape)) > MAX_ELEMENTS:
        raise ValueError(f"its result has more than {MAX_ELEMENTS:,} values")
    sizes = zip(first.shape, second.shape, strict=True)
    return TensorSpec(tuple(a if a == b else None for a, b in sizes), str(first.dtype))


def _with_32_bits(array: np.ndarray) -> Array | np.ndarray:
    """Clip int64 to int32, since ONNX's largest int64 stands for the end of an axis."""
    if array.dtype == np.int64:
        return np.clip(array, _INT32.min, _INT32.max).astype(np.int32)
    return array


Results = OnnxValue | tuple[OnnxValue, ...]


@dataclass(frozen=True)
class OnnxNodeReader:
    """A node, the values of its inputs, and the graph that is built.

    Methods raise ValueError for an input or attribute that is missing or of the wrong kind. `place`
    is the index of an input.
    """

    node: OnnxNode
    inputs: Sequence[OnnxValue | None]
    graph: TorchGraphBuilder
    opset: int
    transposable: frozenset[str]
    """Names of the weights that only one node reads, which may be stored in another order."""

    def value(self, place: int = 0) -> OnnxValue:
        """Return an input."""
        value = self.optional(place)
        if value is None:
            raise ValueError(f"input {place} is missing")
        return value

    def optional(self, place: int) -> OnnxValue | None:
        """Return an input, or None if the node leaves it out."""
        return self.inputs[place] if place < len(self.inputs) else None

    def values(self) -> tuple[OnnxValue, ...]:
        """Return all inputs."""
        return tuple(map(self.value, range(len(self.inputs))))

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or the default. It must have the default's type, unless None."""
        value = self.node.attributes.get(name, default)
        types: Any = {int: int, float: (int, float), str: str, tuple: tuple}.get(type(default))
        if types is not None and not isinstance(value, types):
            raise ValueError(f"attribute {name} = {value!r}; must be like {default!r}")
        return value

    def integers(self, name: str, place: int) -> tuple[int, ...] | None:
        """Return whole numbers of an attribute, or of an input (later opsets), or None."""
        if name in self.node.attributes:
            value = self.attribute(name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(number, int) for number in numbers):
                raise ValueError(f"attribute {name} = {value!r}; must be whole numbers")
            return numbers
        value = self.optional(place)
        return None if value is None else self.graph.fixed_integers(value)

    def sizes(self, place: int) -> tuple[Length, ...]:
        """Return whole numbers of an input, which may depend on the batch."""
        return self.graph.integers(self.value(place))

    def number(self, name: str, place: int, default: float | None) -> float | None:
        """Return the number of an attribute, or of an input (later opsets), or the default."""
        if name in self.node.attributes:
            return float(self.attribute(name, 0.0))
        value = self.optional(place)
        if value is None:
            return default
        if not value.is_constant or value.arrays[0].size != 1 or not value.is_fixed():
            raise ValueError(f"{name} must be one constant number")
        return float(np.reshape(value.arrays[0], ()))

    def axis(self, default: int) -> int:
        """Return the attribute `axis`, which may be negative, as an index of the first input."""
        return require_axis(self.attribute("axis", default), self.value().ndim)

    def shape(self) -> tuple[Length, ...]:
        """Return the shape of the first input."""
        return self.graph.shape(self.value())

    def fixed_sizes(self, first_axis: int) -> tuple[int, ...]:
        """Return the first input's sizes from an axis on. They must not depend on the batch."""
        return self.graph.fixed_shape(self.value(), first_axis)


def require_axis(axis: int, ndim: int) -> int:
    """Return an axis, which may be negative, as an index. Raises ValueError for a missing axis."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} of a tensor with {ndim} axes")
    return axis % ndim


ReadNode = Callable[[OnnxNodeReader], Results]
"""Adds nodes of PyTorch's operators that compute a node of ONNX, and returns their outputs.

Raises ValueError if no such operators compute it.
"""
ONNX_OPERATORS: dict[str, ReadNode] = {}
"""Functions that translate ONNX's operators, by the operators' names."""
Function = TypeVar("Function", bound=ReadNode)


def onnx_operator(*names: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a function for these operators."""

    def register(function: Function) -> Function:
        for name in names:
            assert name not in ONNX_OPERATORS, f"{name} is registered twice"
            ONNX_OPERATORS[name] = function
        return function

    return register
