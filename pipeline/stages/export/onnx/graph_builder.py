"""Builder of an ONNX graph: nodes, constants, and values with their shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import numpy as np

OPSET = 17
"""ONNX's operator set, with LayerNormalization; runtimes since 2022 support it."""
IR_VERSION = 8
"""The file format of ONNX 1.12, which brought this operator set."""
BATCH = "batch"

Order = Literal["nhwc", "nchw"]


@dataclass(frozen=True)
class NodeOutput:
    """A tensor of the graph."""

    name: str
    shape: tuple[int, ...]
    """Sizes without the batch, with channels last in any `order`: (height, width, channels) or
    (tokens, features)."""
    order: Order = "nhwc"
    """Order of the tensor's axes: channels last or first, also for tokens and volumes."""
    dtype: str = "float32"
    """float32 within the network; of samples, their column's."""

    @property
    def has_positions(self) -> bool:
        """Whether it has axes besides the channels, such as height and width."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class GraphBuilder:
    """Nodes and constants of a graph. Methods read the weights of the layer at `path`."""

    weights: Mapping[str, np.ndarray]
    """The arrays of the network by full name, such as `params/conv_0/kernel`."""
    path: tuple[str, ...] = ()
    token_mask: str | None = None
    """Name of the mask of tokens, bool (batch, tokens), false for padding; None without padding."""
    input_masks: Mapping[str, str] = field(default_factory=dict)
    """Names of the masks of several inputs, by the network's names of these."""
    taken: Collection[str] = ()
    """Names that no node or constant may have: of the graph's inputs and its output."""
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def enter(self, name: str) -> GraphBuilder:
        """Return a builder of the same graph for an inner layer."""
        return replace(self, path=(*self.path, name))

    def add_node(
        self, kind: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any
    ) -> str:
        """Add a node; return the name of its first output. The others end in _2, _3 and so on."""
        from onnx import helper

        output = self._make_unique(kind.lower(), f"{kind.lower()}_{next(self._numbers)}")
        names = [output, *(f"{output}_{number}" for number in range(2, outputs + 1))]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return output

    def add_constant(self, name: str, array: np.ndarray) -> str:
        """Add a constant, with a number if its name is taken; return its name."""
        unique = self._make_unique(name, name)
        self.constants[unique] = np.ascontiguousarray(array)
        return unique

    def _make_unique(self, prefix: str, name: str) -> str:
        """Return a name, or if it is taken the prefix with a number."""
        while name in self.constants or name in self.taken:
            name = f"{prefix}_{next(self._numbers)}"
        return name

    def add_scalar(self, value: float) -> str:
        """Add a float32 scalar; return its name."""
        return self.add_constant("number", np.array(value, np.float32))

    def read_weight(self, name: str, kind: str = "params") -> np.ndarray:
        """Return a parameter or a statistic of the layer, float32."""
        return np.asarray(self.weights["/".join((kind, *self.path, name))], np.float32)

    def add_weight(self, name: str, array: np.ndarray | None = None) -> str:
        """Add a parameter of the layer, or `array` in its place, as a constant; return its name.
        A layer that reads several inputs has one constant."""
        array = self.read_weight(name) if array is None else array
        name = "/".join((*self.path, name))
        if name in self.constants and np.array_equal(self.constants[name], array):
            return name
        return self.add_constant(name, array)

    def add_slice(self, x: str, bounds: Sequence[Sequence[int]]) -> str:
        """Add a slice of `x`; `bounds` are its starts, ends, axes and perhaps steps."""
        names = [self.add_constant("bounds", np.array(numbers, np.int64)) for numbers in bounds]
        return self.add_node("Slice", [x, *names])

    def add_axis(self, axis: int) -> str:
        """Add the number of an axis for nodes that read it; return its name."""
        return self.add_constant("axes", np.array([axis], np.int64))

    def add_bias(self) -> list[str]:
        """Add the bias of the layer as a constant; return its name, or [] without a bias."""
        has_bias = "/".join(("params", *self.path, "bias")) in self.weights
        return [self.add_weight("bias")] if has_bias else []

    def to_order(self, value: NodeOutput, order: Order) -> NodeOutput:
        """Return a value with its axes in an order; add a transpose if it needs one."""
        if not value.has_positions or value.order == order:
            return value
        last = len(value.shape)
        perm = (0, last, *range(1, last)) if order == "nchw" else (0, *range(2, last + 1), 1)
        name = self.add_node("Transpose", [value.name], perm=perm)
        return replace(value, name=name, order=order)

    def cast(self, value: NodeOutput, dtype: str) -> NodeOutput:
        """Return a value in a type; add a cast if it has another."""
        from onnx import helper

        if value.dtype == dtype:
            return value
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return replace(value, name=self.add_node("Cast", [value.name], to=kind), dtype=dtype)

    def clear_padding(self, x: NodeOutput, padding: str | None = None) -> NodeOutput:
        """Return tokens (batch, tokens, features) with zeros, or with `padding` (batch, 1,
        features), in place of padding."""
        if self.token_mask is None:
            return x
        channels = self.add_axis(1 if x.order == "nchw" else 2)
        is_token = self.add_node("Unsqueeze", [self.token_mask, channels])
        padding = padding or self.add_scalar(0.0)
        return replace(x, name=self.add_node("Where", [is_token, x.name, padding]))

    def reshape(
        self, value: NodeOutput, sizes: Sequence[int], shape: tuple[int, ...]
    ) -> NodeOutput:
        """Reshape a value to `sizes`, with -1 for the batch; `shape` is the output's."""
        target = self.add_constant("shape", np.array(sizes, np.int64))
        name = self.add_node("Reshape", [value.name, target])
        return replace(value, name=name, shape=shape)
