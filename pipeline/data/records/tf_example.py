"""The protobuf message tf.train.Example: named lists of bytes, floats or integers.

Source of the field numbers: tensorflow/core/example/example.proto and feature.proto.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.records.tfrecord_file import read_record, scan_records

_SCHEMA = """
name: "pipeline/tf_example.proto" package: "pipeline" syntax: "proto3"
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".pipeline.Features" } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED
          type: TYPE_MESSAGE type_name: ".pipeline.Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL
            type: TYPE_MESSAGE type_name: ".pipeline.Feature" } } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 oneof_index: 0
          type: TYPE_MESSAGE type_name: ".pipeline.BytesList" }
  field { name: "float_list" number: 2 oneof_index: 0
          type: TYPE_MESSAGE type_name: ".pipeline.FloatList" }
  field { name: "int64_list" number: 3 oneof_index: 0
          type: TYPE_MESSAGE type_name: ".pipeline.Int64List" } }
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
"""
"""The message's definition, in protobuf's text format."""
Feature = tuple[bytes, ...] | np.ndarray
"""Values of a feature: bytes, or numbers, which in an Example are float32 or int64 (n,)."""
Visit = Callable[[int, Mapping[str, Feature]], None]
"""Function that is called with the number of a record, and the record's features by name."""


@dataclass(frozen=True)
class TFRecordFile:
    """A TFRecord file of Examples, which are read one by one."""

    path: Path
    spans: np.ndarray
    """Position and length in bytes of each record, int64 (records, 2)."""

    def read_example(self, record: int) -> Mapping[str, Feature]:
        """Return the features of an Example by name. Raises OSError, and ValueError for damage."""
        start, length = self.spans[record].tolist()
        return parse_example(read_record(self.path, record, start, length))


def index_tfrecord(path: Path, visit: Visit) -> TFRecordFile:
    """Call `visit` for each record, and return the indexed file. Raises OSError and ValueError."""
    spans = []
    for record, (start, content) in enumerate(scan_records(path)):
        try:
            features = parse_example(content)
        except ValueError as error:
            raise ValueError(f"record {record}: {error}") from error
        visit(record, features)
        spans.append((start, len(content)))
    return TFRecordFile(path, np.array(spans, np.int64))


def parse_example(content: bytes) -> Mapping[str, Feature]:
    """Return the features of an Example by name. Raises ValueError if it isn't an Example."""
    from google.protobuf.message import DecodeError

    try:
        example = make_example_type().FromString(content)
    except DecodeError as error:
        raise ValueError(f"isn't a tf.train.Example: {error}") from error
    return _Features(example.features.feature)


class _Features(Mapping[str, Feature]):
    """Features by name. Values are converted on access, since unused values may be large."""

    def __init__(self, features: Any) -> None:
        self._features = features

    def __getitem__(self, name: str) -> Feature:
        if name not in self._features:
            raise KeyError(name)
        feature = self._features[name]
        kind = feature.WhichOneof("kind")
        if kind == "bytes_list":
            return tuple(feature.bytes_list.value)
        if kind == "float_list":
            return np.array(feature.float_list.value, np.float32)
        return np.array(feature.int64_list.value, np.int64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)


@cache
def make_example_type() -> Any:
    """Return the class of the message. It is in a new pool, since TensorFlow, which has the same
    message in the default pool, may be loaded."""
    # Few runs need this slow import.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pipeline.Example"))
