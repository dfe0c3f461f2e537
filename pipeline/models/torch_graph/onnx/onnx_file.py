"""ONNX files: protocol buffers, read without the onnx package.

Messages by field number, as onnx/onnx.proto of ONNX 1.19 defines them:

    ModelProto      2: producer_name   3: producer_version   7: graph   8: repeated opset_import
    OperatorSetId   1: domain   2: version
    GraphProto      1: repeated node   5: repeated initializer   11: repeated input
                    12: repeated output   15: repeated sparse_initializer
    NodeProto       1: repeated input   2: repeated output   3: name   4: op_type
                    5: repeated attribute   7: domain
    AttributeProto  1: name   2: f   3: i   4: s   5: t   7: repeated floats   8: repeated ints
                    9: repeated strings   20: type
    TensorProto     1: repeated dims   2: data_type   4: float_data   5: int32_data   7: int64_data
                    8: name   9: raw_data   10: double_data   11: uint64_data
                    13: repeated external_data   14: data_location
    ValueInfoProto  1: name   2: type, with 1.1: elem_type, and dims 1.2.1 with 1: dim_value

Files aren't trusted: nothing in them is executed, and no array is larger than its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import count_array_bytes
from pipeline.models.weights.files.named_arrays import BFLOAT16
from pipeline.models.weights.files.protobuf_fields import Message

SUFFIX = ".onnx"
MAX_BYTES = 2**31 - 1
"""Largest size of a file; external data may be larger."""
MAX_FIELDS = 500_000
"""Most fields of a message."""
MAX_NODES = 100_000
_KIND = "an ONNX file"
_EXTERNAL = 1
"""Value of data_location for a tensor that is in another file."""
_DTYPES: Mapping[int, np.dtype] = {
    1: np.dtype("<f4"),
    2: np.dtype("u1"),
    3: np.dtype("i1"),
    5: np.dtype("<i2"),
    6: np.dtype("<i4"),
    7: np.dtype("<i8"),
    9: np.dtype("bool"),
    10: np.dtype("<f2"),
    11: np.dtype("<f8"),
    16: BFLOAT16,
}
"""Dtypes by ONNX's numbers."""
_TEXTS = 8
"""ONNX's number of tensors of texts, such as names of classes."""
_ATTRIBUTE_TYPES = {2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6, 8: 7, 9: 8}
"""Types of attributes by the field of their value, for files that are older than the types."""
DTYPE_NAMES = {number: dtype.name for number, dtype in _DTYPES.items()}
"""Names of dtypes by ONNX's numbers."""

Attribute = float | int | str | tuple[float, ...] | tuple[int, ...] | tuple[str, ...] | np.ndarray


@dataclass(frozen=True)
class OnnxNode:
    """A call of an operator. An optional input that is left out has an empty name."""

    name: str
    op: str
    """Operator, such as `Conv`, or `com.example.Conv` of a domain that isn't ONNX's."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute] = field(repr=False)


@dataclass(frozen=True)
class OnnxTensor:
    """An input or output of the network. A size that the file leaves open is None."""

    name: str
    dtype: str
    """Name of the dtype; `other` for a sequence, a map, or a dtype that isn't read."""
    shape: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """The content of a file."""

    file: str
    """Name of the file, without its folder."""
    producer: str
    """Program that wrote the file, with the program's version."""
    opset: int
    nodes: tuple[OnnxNode, ...]
    initializers: Mapping[str, np.ndarray] = field(repr=False)
    inputs: tuple[OnnxTensor, ...]
    """Without the initializers, which old files list as inputs too."""
    outputs: tuple[OnnxTensor, ...]

    def describe(self, node: OnnxNode) -> str:
        """Describe a node for messages."""
        name = f" {show_name(node.name)}" if node.name else ""
        return f"{self.file}: {show_name(node.op)}{name}, opset {self.opset}"

    def require_order(self) -> None:
        """Raise ValueError unless each node reads tensors that are defined before it, once.

        So no tensors depend on each other in a cycle.
        """
        defined = {"", *self.initializers, *(value.name for value in self.inputs)}
        for node in self.nodes:
            for name in node.inputs:
                if name not in defined:
                    problem = f"reads {show_name(name)}, which is not before it"
                    raise ValueError(f"{self.describe(node)} {problem}")
            for name in filter(None, node.outputs):
                if name in defined:
                    raise ValueError(f"{self.describe(node)} computes {show_name(name)} again")
                defined.add(name)


def read_onnx(path: Path) -> OnnxModel:
    """Read a file and its external data. Raises ValueError that names the file."""
    try:
        model = _read_model(path, memoryview(read_bytes(path, MAX_BYTES)))
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is damaged: a name is no text") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    model.require_order()
    return model


def _read_model(path: Path, content: memoryview) -> OnnxModel:
    model = Message(content, MAX_FIELDS, _KIND)
    graphs = list(model.messages(7))
    if len(graphs) != 1:
        raise ValueError(f"it is not {_KIND}")
    graph = graphs[0]
    opsets = {opset.text(1): opset.integer(2, 1) for opset in model.messages(8)}
    nodes = tuple(map(_read_node, graph.messages(1)))
    if not 1 <= len(nodes) <= MAX_NODES:
        raise ValueError(f"it has {len(nodes):,} nodes; must have 1 to {MAX_NODES:,}")
    if 15 in graph.fields:
        raise ValueError("it has sparse weights, which aren't read")
    initializers = {t.text(8): _read_tensor(t, path.parent) for t in graph.messages(5)}
    outputs = tuple(map(_read_signature, graph.messages(12)))
    if not outputs:
        raise ValueError("its network has no output")
    inputs = map(_read_signature, graph.messages(11))
    return OnnxModel(
        path.name,
        " ".join(filter(None, (model.text(2), model.text(3)))),
        opsets.get("", opsets.get("ai.onnx", 1)),
        nodes,
        initializers,
        tuple(value for value in inputs if value.name not in initializers),
        outputs,
    )


def _read_node(message: Message) -> OnnxNode:
    domain = message.text(7)
    op = message.text(4)
    attributes = {a.text(1): _read_attribute(a) for a in message.messages(5)}
    return OnnxNode(
        message.text(3),
        op if domain in ("", "ai.onnx") else f"{domain}.{op}",
        message.texts(1),
        message.texts(2),
        {name: value for name, value in attributes.items() if value is not None},
    )


def _read_attribute(message: Message) -> Attribute | None:
    """Return the value of an attribute; None for subgraphs, which no operator here has. Raises
    ValueError for an attribute that has neither a type nor a value."""
    fields = [field for field in _ATTRIBUTE_TYPES if field in message.fields]
    match message.integer(20) or (_ATTRIBUTE_TYPES[fields[0]] if fields else 0):
        case 0:  # UNDEFINED
            raise ValueError(f"attribute {show_name(message.text(1))} has no type and no value")
        case 1:  # FLOAT
            numbers = message.floats(2, "<f4")
            # The shortest decimal: 1e-5, not 9.999999747378752e-06.
            return float(str(numbers[-1])) if numbers.size else 0.0
        case 2:  # INT
            return message.integer(3)
        case 3:  # STRING
            return str(message.content(4), "utf-8", "replace")
        case 4:  # TENSOR
            tensors = list(message.messages(5))
            return _read_tensor(tensors[-1], None) if tensors else None
        case 6:  # FLOATS
            return tuple(map(float, message.floats(7, "<f4")))
        case 7:  # INTS
            return tuple(message.integers(8))
        case 8:  # STRINGS
            return message.texts(9)
    return None


def _read_tensor(message: Message, folder: Path | None) -> np.ndarray:
    """Return a tensor's array. External data must be below `folder`; for None it is refused."""
    name = message.text(8)
    number = message.integer(2)
    if number not in _DTYPES:
        raise ValueError(f"tensor {show_name(name)} is of type {number} of ONNX, which isn't read")
    dtype = _DTYPES[number]
    shape = message.integers(1)
    size = count_array_bytes(name, dtype, shape)
    is_external = message.integer(14) == _EXTERNAL
    if is_external or 9 in message.fields:
        raw = _read_external(message, name, size, folder) if is_external else message.content(9)
        if len(raw) != size:
            raise ValueError(f"tensor {show_name(name)} has {len(raw):,} bytes for {size:,}")
        array = np.frombuffer(raw, dtype)
    else:
        array = _read_typed_values(message, dtype)
    if array.nbytes != size:
        raise ValueError(f"tensor {show_name(name)} has {array.size:,} values for shape {shape}")
    return array.reshape(shape)


def _read_typed_values(message: Message, dtype: np.dtype) -> np.ndarray:
    """Return the values of a tensor from the field of its type, without axes."""
    if dtype.name == "float32":
        return message.floats(4, "<f4")
    if dtype.name == "float64":
        return message.floats(10, "<f8")
    integers = np.array(message.integers(7 if dtype.name == "int64" else 5), np.int64)
    if dtype.name in ("float16", "bfloat16"):
        return integers.astype(np.uint16).view(dtype)
    return integers.astype(dtype)


def _read_external(message: Message, name: str, size: int, folder: Path | None) -> bytes:
    """Return the `size` bytes of a tensor in another file.

    Raises ValueError if that file isn't below the folder, or is missing or too short.
    """
    entries = {entry.text(1): entry.text(2) for entry in message.messages(13)}
    location = entries.get("location", "")
    offset = entries.get("offset") or "0"
    length = entries.get("length") or str(size)
    is_place = offset.isdecimal() and len(offset) < 20 and length == str(size)
    if folder is None or not location or "\0" in location or not is_place:
        raise ValueError(
            f"external data of tensor {show_name(name)} has no valid location, offset and length"
        )
    try:
        file = (folder / location).resolve()
    except RuntimeError:  # a link to itself, on Python 3.11 and 3.12
        file = folder.resolve() / location
    if not file.is_relative_to(folder.resolve()):
        raise ValueError(
            f"external data of tensor {show_name(name)} is in {show_name(location)}, which is "
            "outside of the file's folder"
        )
    if not file.is_file() or file.stat().st_size < int(offset) + size:
        raise ValueError(
            f"external data of tensor {show_name(name)}: {show_name(location)} is missing or too "
            "short"
        )
    with file.open("rb") as stream:
        stream.seek(int(offset))
        return stream.read(size)


def _read_signature(message: Message) -> OnnxTensor:
    """Return the input or output that a ValueInfoProto describes."""
    types = [tensor for kind in message.messages(2) for tensor in kind.messages(1)]
    if not types:
        return OnnxTensor(message.text(1), "other", ())
    sizes = [dim.integer(1) for shape in types[-1].messages(2) for dim in shape.messages(1)]
    shape = tuple(size if size > 0 else None for size in sizes)
    dtypes = {**DTYPE_NAMES, _TEXTS: "str"}
    return OnnxTensor(message.text(1), dtypes.get(types[-1].integer(1), "other"), shape)
