"""ONNX files that other frameworks wrote, and what they computed; models built by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.models.torch_graph.graph import SampleSpec, TorchGraph
from pipeline.models.torch_graph.onnx.import_onnx import import_onnx

FOLDER = Path(__file__).parents[3] / "golden" / "onnx"
NAMES = sorted(path.stem for path in FOLDER.glob("*.onnx"))


class OperatorCase(NamedTuple):
    """A network of one operator: the file, samples as images, and ONNX Runtime's result."""

    content: bytes
    images: np.ndarray
    y: np.ndarray


@cache
def golden_network(name: str) -> TorchGraph:
    """A network of tests/golden/onnx."""
    image = golden_arrays(name)["images"].shape[1:]
    return import_onnx(FOLDER / f"{name}.onnx", [SampleSpec(image)])


@cache
def golden_arrays(name: str) -> Mapping[str, np.ndarray]:
    """Images NHWC, labels, logits and losses."""
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    return {**arrays, "images": arrays["images"].transpose(0, 2, 3, 1)}


@cache
def operator_cases() -> Mapping[str, OperatorCase]:
    """The networks of one operator by name."""
    with np.load(FOLDER / "operators.npz") as file:
        arrays = {key: file[key] for key in file.files}
    return dict(_split_cases(arrays))


def _split_cases(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, OperatorCase]]:
    values = arrays["values"]
    content = arrays["models"]
    rows = zip(arrays["names"], arrays["lengths"], json.loads(str(arrays["shapes"])), strict=True)
    for name, length, (shape, result) in rows:
        x, y, values = np.split(values, np.cumsum([np.prod(shape), np.prod(result, dtype=int)]))
        x = x.reshape(shape)
        images = x.transpose(0, 2, 3, 1) if x.ndim == 4 else x.reshape(shape[0], 1, 1, -1)
        yield str(name), OperatorCase(content[:length].tobytes(), images, y.reshape(result))
        content = content[length:]


# Fields of onnx.proto by name, to build models without the onnx package.
MODEL = {"graph": 7, "opset_import": 8}
GRAPH = {"node": 1, "initializer": 5, "input": 11, "output": 12}
NODE = {"input": 1, "output": 2, "name": 3, "op_type": 4, "attribute": 5, "domain": 7}
TENSOR = {"dims": 1, "data_type": 2, "name": 8, "raw_data": 9, "external_data": 13, "location": 14}


def encode(fields: Mapping[int, Any]) -> bytes:
    """A message of protocol buffers: whole numbers, texts, bytes, and lists of these."""
    content = b""
    for number, value in fields.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int):
                content += _varint(number << 3) + _varint(item)
            else:
                data = item.encode() if isinstance(item, str) else item
                content += _varint(number << 3 | 2) + _varint(len(data)) + data
    return content


def _varint(value: int) -> bytes:
    pieces = []
    while value >= 0x80:
        pieces.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*pieces, value])


def node(op: str, inputs: list[str], output: str | list[str], **fields: Any) -> bytes:
    """A NodeProto."""
    named = {NODE[name]: value for name, value in fields.items()}
    return encode({1: inputs, 2: output, 4: op, **named})


def tensor(name: str, array: np.ndarray, **fields: Any) -> bytes:
    """A TensorProto of float32 or int64."""
    kind = 1 if array.dtype == np.float32 else 7
    message = {1: list(array.shape), 2: kind, 8: name, 9: array.tobytes()}
    message |= {TENSOR[key]: value for key, value in fields.items()}
    return encode(message)


def signature(name: str, *sizes: int | str) -> bytes:
    """A ValueInfoProto of float32."""
    dims = [encode({2: size} if isinstance(size, str) else {1: size}) for size in sizes]
    return encode({1: name, 2: encode({1: encode({1: 1, 2: encode({1: dims})})})})


def model(nodes: list[bytes], initializers: list[bytes] = [], **changes: Any) -> bytes:  # noqa: B006
    """A ModelProto from x (batch, 6) to y."""
    graph = {1: nodes, 5: initializers, 11: signature("x", "batch", 6), 12: signature("y")}
    graph |= {GRAPH[name]: value for name, value in changes.items()}
    return encode({7: encode(graph), 8: encode({2: 17})})


def two_inputs(first: str = "image", second: str = "features") -> tuple[bytes, np.ndarray]:
    """A ModelProto of an image (1, 4, 8) and numbers (4,), and its kernel (36, 10): the product of
    both, one after the other."""
    kernel = np.random.default_rng(0).normal(0, 0.1, size=(36, 10)).astype(np.float32)
    nodes = [
        node("Flatten", [first], "flat"),
        node("Concat", ["flat", second], "all", attribute=[encode({1: "axis", 3: 1, 20: 2})]),
        node("MatMul", ["all", "kernel"], "y"),
    ]
    inputs = [signature(first, "n", 1, 4, 8), signature(second, "n", 4)]
    return model(nodes, [tensor("kernel", kernel)], input=inputs), kernel
