"""Builder of an ONNX graph: nodes, constants, and values with their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

OPSET = 17
"""The operator set: LayerNormalization is in it, and runtimes of 2022 and later have it."""
IR_VERSION = 8
BATCH = "batch"

Order = Literal["nhwc", "nchw"]


@dataclass(frozen=True)
class NodeOutput:
    """A tensor of the graph."""

    name: str
    shape: tuple[int, ...]
    """Without the batch; of images (height, width, channels), in whatever order they lie."""
    order: Order = "nhwc"
    """The order that images lie in; of other tensors it means nothing."""

    @property
    def is_image(self) -> bool:
        """Whether it has height, width and channels."""
        return len(self.shape) == 3


class GraphBuilder:
    """Nodes and constants of a graph in the order they are added.

    `weights` are the arrays of the network by full name, such as `params/conv_0/kernel`.
    """

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self.weights = weights
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}
        self._count = 0

    def node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        from onnx import helper

        self._count += 1
        output = f"{kind.lower()}_{self._count}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def constant(self, name: str, array: np.ndarray) -> str:
        """Add a constant, or one of another name where that is taken; return its name."""
        unique = name
        while unique in self.constants:
            self._count += 1
            unique = f"{name}_{self._count}"
        self.constants[unique] = np.ascontiguousarray(array)
        return unique

    def number(self, value: float) -> str:
        """Add a float32 scalar."""
        return self.constant("number", np.array(value, np.float32))

    def weight(self, path: Sequence[str], name: str, kind: str = "params") -> np.ndarray:
        """A parameter or a statistic of the layer at `path`, float32."""
        return np.asarray(self.weights["/".join((kind, *path, name))], np.float32)

    def has_weight(self, path: Sequence[str], name: str) -> bool:
        """Whether the layer at `path` has a parameter of that name."""
        return "/".join(("params", *path, name)) in self.weights

    def in_order(self, value: NodeOutput, order: Order) -> NodeOutput:
        """The images of a value in an order of axes; other tensors unchanged."""
        if not value.is_image or value.order == order:
            return value
        perm = (0, 3, 1, 2) if order == "nchw" else (0, 2, 3, 1)
        return replace(value, name=self.node("Transpose", [value.name], perm=perm), order=order)

    def reshaped(
        self, value: NodeOutput, sizes: Sequence[int], shape: tuple[int, ...]
    ) -> NodeOutput:
        """A value in other sizes (-1 for the batch), which are those of `shape`."""
        target = self.constant("shape", np.array(sizes, np.int64))
        return NodeOutput(self.node("Reshape", [value.name, target]), shape, value.order)
