"""Builder of a graph's nodes from ONNX, which computes all shapes and folds constants.

Shapes in an ONNX file may depend on the batch in any way, and the file needn't have them. So the
shape of every value is computed at two batch sizes. A size that differs between them must be linear
in the batch, and nodes of the graph compute it from the input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.models.lowerings.problem.lowering import DEFAULTS
from pipeline.models.torch_graph.graph import INPUT, ArrayOf, GraphNode, TensorSpec, ValueOf
from pipeline.models.torch_graph.operator_table import OperatorContext
from pipeline.models.torch_graph.operators.known_operators import find_operator
from pipeline.models.torch_graph.tensor import TorchTensor, to_tensor

MAX_ELEMENTS = 2**31
"""Limit of the values of any result, for two samples."""
MAX_CONSTANTS = 2**26
"""Limit of the values of all constants that are computed."""
_INT32 = np.iinfo(np.int32)


class TrainingFlag:
    """An argument that is true in the form for training, and false in the one for evaluation."""


TRAINING = TrainingFlag()


@dataclass(frozen=True)
class BatchSize:
    """A size that is linear in the batch."""

    per_sample: int
    constant: int


Length = int | BatchSize
BATCH = BatchSize(1, 0)


@dataclass(frozen=True, eq=False)
class OnnxValue:
    """A tensor of the network at each batch size."""

    reference: ValueOf | ArrayOf | None
    """Its place in the graph; None for a constant, which has a place once a node reads it."""
    arrays: tuple[Any, ...]
    """Arrays of numpy for a constant, else arrays that JAX traces."""

    @property
    def is_constant(self) -> bool:
        """Whether it depends on neither the network's input nor weights."""
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
        """Whether it is a constant without axes that doesn't depend on the batch."""
        return self.is_constant and self.ndim == 0 and self.is_fixed()

    def is_fixed(self) -> bool:
        """Whether a constant doesn't depend on the batch."""
        first, second = self.arrays
        return first is second or np.array_equal(first, second, equal_nan=self.is_float)


Argument = Any
"""An `OnnxValue`, a `BatchSize`, `TRAINING`, a `TypeOf`, a number, text or None, or a tuple."""


@dataclass
class TorchGraphBuilder:
    """The nodes of a graph and its arrays, in the order they are added."""

    batches: tuple[int, int]
    """The batch sizes at which shapes are computed; equal if the network has only one."""
    weights: dict[str, np.ndarray]
    """Parameters and statistics by their names here, in PyTorch's order of axes."""
    declared_batch: int | None
    """The batch size of the file's input; None if it is open."""
    nodes: list[GraphNode] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    module: str = ""
    """Module of the nodes that are added."""
    kind: str = ""
    line: str = ""
    _sizes: dict[BatchSize, ValueOf] = field(default_factory=dict)
    _stored: dict[int, tuple[np.ndarray, ArrayOf]] = field(default_factory=dict)
    """Constants that nodes read, by the identity of their arrays."""
    _folded: int = 0
    """Number of values of all constants that were computed."""

    def input(self, spec: TensorSpec) -> OnnxValue:
        """Return the network's input."""
        shapes = [(batch, *(size or 0 for size in spec.shape[1:])) for batch in self.batches]
        dtype = "float32" if spec.dtype.startswith("float") else "int32"
        return OnnxValue(
            ValueOf(INPUT), tuple(to_tensor(jnp.zeros(shape, dtype)) for shape in shapes)
        )

    def weight(self, name: str) -> OnnxValue:
        """Return a parameter or a statistic."""
        array = to_tensor(jnp.zeros(self.weights[name].shape))
        return OnnxValue(ArrayOf(name), (array, array))

    def constant(self, array: Any) -> OnnxValue:
        """Return a constant that doesn't depend on the batch; floats become float32."""
        array = np.asarray(array)
        if array.dtype.name in ("float64", "float16", "bfloat16"):
            array = array.astype(np.float32)
        return OnnxValue(None, (array, array))

    def shape(self, value: OnnxValue) -> tuple[Length, ...]:
        """Return the shape of a value."""
        first, second = (array.shape for array in value.arrays)
        return tuple(map(self.size, first, second))

    def fixed_shape(self, value: OnnxValue) -> tuple[int, ...]:
        """Return the shape, 0 for a batch size. Raises ValueError if another size depends on it."""
        sizes = self.shape(value)
        if any(isinstance(size, BatchSize) for size in sizes[1:]):
            raise ValueError(f"a size depends on the batch: {sizes}")
        return tuple(size if isinstance(size, int) else 0 for size in sizes)

    def transpose_weight(self, name: str) -> OnnxValue:
        """Store a matrix of weights transposed, and return it. Nothing else may read it."""
        self.weights[name] = np.ascontiguousarray(self.weights[name].T)
        return self.weight(name)

    def keep_batch_open(self, value: OnnxValue, shape: Sequence[Length]) -> tuple[Length, ...]:
        """Return a shape to reshape to, with the batch in place of the size that the file fixes.

        Files that were exported for one batch size have it as the first size of such shapes.
        """
        first = self.shape(value)[:1]
        if self.declared_batch and first == (BATCH,) and tuple(shape[:1]) == (self.declared_batch,):
            return (BATCH, *shape[1:])
        return tuple(shape)

    def repeat_for_batch(self, value: OnnxValue) -> OnnxValue:
        """Return a value whose first size the file fixes to its batch size, for every sample."""
        sizes = self.shape(value)
        if sizes[0] != 1 or self.declared_batch != 1:
            return value
        return self.call("expand.default", value, (BATCH, *sizes[1:]))

    def size(self, first: int, second: int) -> Length:
        """Return the size with these values at the two batches. Raises ValueError if none has."""
        if first == second:
            return first
        low, high = self.batches
        per_sample, remainder = divmod(second - first, high - low)
        if remainder:
            raise ValueError(f"sizes {first} and {second}, which aren't linear in the batch size")
        return BatchSize(per_sample, first - per_sample * low)

    def integers(self, value: OnnxValue) -> tuple[Length, ...]:
        """Return constant whole numbers. Raises ValueError if they are computed from the input."""
        if not value.is_constant:
            raise ValueError("a shape or an axis depends on the values of the network's input")
        first, second = (np.atleast_1d(array).tolist() for array in value.arrays)
        return tuple(map(self.size, first, second))

    def fixed_integers(self, value: OnnxValue) -> tuple[int, ...]:
        """Return whole numbers that don't depend on the batch. Raises ValueError for others."""
        sizes = self.integers(value)
        if any(isinstance(size, BatchSize) for size in sizes):
            raise ValueError("a number depends on the batch size, where it can't")
        return tuple(size for size in sizes if isinstance(size, int))

    def call(self, op: str, *args: Argument, **kwargs: Argument) -> OnnxValue:
        """Add a node such as `relu.default`, and return its first result."""
        return self.call_all(op, *args, **kwargs)[0]

    def call_all(self, op: str, *args: Argument, **kwargs: Argument) -> tuple[OnnxValue, ...]:
        """Add a node, and return all its results; a node that reads only constants is computed."""
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

    def _compute(self, node: GraphNode, at: int, *, folds: bool = False) -> Any:
        """Return the result of a node, a tensor or a tuple of them, at one of the batch sizes."""
        context = OperatorContext("float32", DEFAULTS, "nhwc", None)

        def read(argument: Argument) -> Any:
            match argument:
                case OnnxValue(is_constant=True):
                    array = argument.arrays[at]
                    is_number = argument.is_number() and not folds
                    return array.item() if is_number else to_tensor(_with_32_bits(array))
                case OnnxValue():
                    return argument.arrays[at]
                case BatchSize():
                    return argument.per_sample * self.batches[at] + argument.constant
                case TrainingFlag():
                    return False
            return argument

        args, kwargs = jax.tree.map(read, (node.args, dict(node.kwargs)))
        return find_operator(node)(context, *args, **kwargs)

    def _fold(self, node: GraphNode, is_fixed: bool) -> tuple[OnnxValue, ...]:
        """Compute a node of constants."""

        def compute(at: int) -> tuple[Array, ...]:
            result = self._compute(node, at, folds=True)
            return tuple(x.plain() for x in (result if isinstance(result, tuple) else (result,)))

        folded = []
        for at in (0,) if is_fixed else (0, 1):
            shapes = jax.eval_shape(partial(compute, at))
            self._folded += sum(math.prod(x.shape) for x in shapes)
            if self._folded > MAX_CONSTANTS:
                raise ValueError(f"its constants have more than {MAX_CONSTANTS:,} values")
            with jax.ensure_compile_time_eval():
                folded.append(tuple(map(np.asarray, compute(at))))
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
        if not value.is_fixed():
            raise ValueError("a tensor is made from the batch size in a way that isn't known here")
        array = value.arrays[0]
        if id(array) not in self._stored:
            name = f"constant@{len(self.constants) + 1}"
            self.constants[name] = np.asarray(_with_32_bits(array))
            self._stored[id(array)] = array, ArrayOf(name)
        return self._stored[id(array)][1]

    def _size_node(self, size: BatchSize) -> ValueOf:
        """Return the node that computes a size."""
        if size not in self._sizes:
            if size == BATCH:
                node = self._append_size("aten.sym_size.int", ValueOf(INPUT), 0)
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


def _make_spec(first: TorchTensor, second: TorchTensor) -> TensorSpec:
    """Return the shape of a result; sizes that differ depend on the batch."""
    if max(math.prod(first.shape), math.prod(second.shape)) > MAX_ELEMENTS:
        raise ValueError(f"its result has more than {MAX_ELEMENTS:,} values")
    sizes = zip(first.shape, second.shape, strict=True)
    return TensorSpec(tuple(a if a == b else None for a, b in sizes), str(first.dtype))


def _with_32_bits(array: np.ndarray) -> Array | np.ndarray:
    """Clip int64 to int32, since ONNX's largest int64 stands for the end of an axis."""
    if array.dtype == np.int64:
        return np.clip(array, _INT32.min, _INT32.max).astype(np.int32)
    return array
