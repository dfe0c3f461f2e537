"""The graph of a network in TensorBoard's form: a GraphDef as a protocol buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BoardNode:
    """An operation, or what the network reads; nodes whose names begin alike are grouped."""

    name: str
    """Its path, unique in the graph."""
    op: str
    inputs: tuple[str, ...]
    """Names of the nodes that it reads."""
    shape: tuple[int, ...]
    """Of its (first) result."""
    dtype: str


def graph_definition(nodes: Sequence[BoardNode]) -> bytes:
    """Encode nodes as a GraphDef; the shape stands at the edges that leave a node."""
    from tensorboardX.proto.attr_value_pb2 import AttrValue
    from tensorboardX.proto.graph_pb2 import GraphDef
    from tensorboardX.proto.node_def_pb2 import NodeDef
    from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboardX.proto.versions_pb2 import VersionDef

    def definition(node: BoardNode) -> NodeDef:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in node.shape])
        shapes = AttrValue(list=AttrValue.ListValue(shape=[shape]))
        attributes = {"_output_shapes": shapes, "dtype": AttrValue(s=node.dtype.encode())}
        return NodeDef(name=node.name, op=node.op, input=node.inputs, attr=attributes)

    graph = GraphDef(node=map(definition, nodes), versions=VersionDef(producer=22))
    encoded: bytes = graph.SerializeToString()
    return encoded
