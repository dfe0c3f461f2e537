"""The message tf.train.Example, as protobuf reads it: named lists of bytes, floats or integers.

Source of the field numbers: tensorflow/core/example/example.proto and feature.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

_PACKAGE = "pipeline.tf_example"

Feature = tuple[bytes, ...] | np.ndarray
"""Values of a feature: bytes, or float32 or int64 (n,)."""


def parse_example(content: bytes) -> Mapping[str, Feature]:
    """The features of an Example by name. Raises ValueError for bytes that are none."""
    from google.protobuf.message import DecodeError

    try:
        example = _example_type().FromString(content)
    except DecodeError as error:
        raise ValueError(f"is no tf.train.Example: {error}") from error
    return _Features(example.features.feature)


def make_example(features: Mapping[str, Feature]) -> bytes:
    """The bytes of an Example with these features."""
    example = _example_type()()
    for name, values in features.items():
        feature = example.features.feature[name]
        if isinstance(values, tuple):
            feature.bytes_list.value.extend(values)
        elif np.issubdtype(values.dtype, np.floating):
            feature.float_list.value.extend(values.tolist())
        else:
            feature.int64_list.value.extend(values.tolist())
    return bytes(example.SerializeToString(deterministic=True))


class _Features(Mapping[str, Feature]):
    """Features whose values are converted when they are asked for."""

    def __init__(self, features: Any) -> None:
        self._features = features

    def __getitem__(self, name: str) -> Feature:
        if name not in self._features:
            raise KeyError(name)
        return _values(self._features[name])

    def __contains__(self, name: object) -> bool:
        return name in self._features

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)


def _values(feature: Any) -> Feature:
    kind = feature.WhichOneof("kind")
    if kind == "bytes_list":
        return tuple(feature.bytes_list.value)
    if kind == "float_list":
        return np.array(feature.float_list.value, np.float32)
    return np.array(feature.int64_list.value, np.int64)


@cache
def _example_type() -> Any:
    """The class of the message, in a pool of its own beside TensorFlow's where that is loaded."""
    # Few runs read such records, and all would wait for its import.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    lists = (
        ("BytesList", "bytes_list", kinds.TYPE_BYTES),
        ("FloatList", "float_list", kinds.TYPE_FLOAT),
        ("Int64List", "int64_list", kinds.TYPE_INT64),
    )
    file = descriptor_pb2.FileDescriptorProto(
        name="pipeline/tf_example.proto", package=_PACKAGE, syntax="proto3"
    )
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, field, kind) in enumerate(lists, 1):
        values = file.message_type.add(name=name)
        values.field.add(name="value", number=1, type=kind, label=kinds.LABEL_REPEATED)
        _add_message(feature, field, number, name).oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    _add_message(entry, "value", 2, "Feature")
    _add_message(features, "feature", 1, "Features.FeatureEntry").label = kinds.LABEL_REPEATED
    _add_message(file.message_type.add(name="Example"), "features", 1, "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Example"))


def _add_message(message: Any, name: str, number: int, kind: str) -> Any:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    return message.field.add(
        name=name,
        number=number,
        type=FieldDescriptorProto.TYPE_MESSAGE,
        type_name=f".{_PACKAGE}.{kind}",
        label=FieldDescriptorProto.LABEL_OPTIONAL,
    )
