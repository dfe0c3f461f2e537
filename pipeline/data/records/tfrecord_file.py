"""TFRecord files of Examples, which are named lists of bytes, floats or integers.

A record is its length as uint64, the checksum of the length, the bytes, and the checksum of the
bytes, all little-endian. A checksum is a masked CRC-32C
(https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details"). Its bytes
are the protobuf message tf.train.Example. Source of the field numbers:
tensorflow/core/example/example.proto and feature.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import DataError

MAX_RECORD_BYTES = 2**26
_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8
"""The format's number that is added to a rotated CRC to mask it."""
_GZIP = b"\x1f\x8b"
"""First bytes of a gzip file."""
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


def read_record(path: Path, record: int, start: int, length: int) -> bytes:
    """Return the bytes of a record from its position and length. Raises OSError, and ValueError if
    the file has changed."""
    with path.open("rb") as file:
        file.seek(start)
        content = file.read(length)
        _require_intact(record, content, length, file.read(_CHECKSUM.size))
    return content


def scan_records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the position and bytes of each record. Raises OSError, and ValueError for damage."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        record = 0
        while header := file.read(_HEADER.size):
            if record == 0 and header.startswith(_GZIP):
                raise ValueError("is compressed; decompress it with gzip -d")
            if len(header) < _HEADER.size:
                raise ValueError(
                    f"record {record} is truncated: {len(header):,} bytes of its length"
                )
            length, checksum = _HEADER.unpack(header)
            if compute_masked_checksum(header[:8]) != checksum:
                raise ValueError(
                    f"record {record}: its length doesn't match its checksum; the file is damaged "
                    "or isn't a TFRecord"
                )
            start = file.tell()
            if length > MAX_RECORD_BYTES:
                raise ValueError(
                    f"record {record} has {length:,} bytes; at most {MAX_RECORD_BYTES:,} are read"
                )
            if start + length + _CHECKSUM.size > file_bytes:
                raise ValueError(
                    f"record {record} is truncated: {length:,} bytes, and the file ends after "
                    f"{max(file_bytes - start, 0):,}"
                )
            content = file.read(length)
            _require_intact(record, content, length, file.read(_CHECKSUM.size))
            yield start, content
            record += 1


def compute_masked_checksum(content: bytes) -> int:
    """Return the masked CRC-32C of bytes. Raises DataError if google-crc32c isn't installed."""
    try:
        import google_crc32c
    except ImportError:
        raise DataError(
            "TFRecord files need google-crc32c; pip install 'recipe-pipeline[tfrecord]'"
        ) from None
    crc = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _require_intact(record: int, content: bytes, length: int, checksum: bytes) -> None:
    """Raise ValueError for a truncated record or a wrong checksum."""
    if len(content) < length or len(checksum) < _CHECKSUM.size:
        raise ValueError(f"record {record} is truncated: {len(content):,} bytes of {length:,}")
    if compute_masked_checksum(content) != _CHECKSUM.unpack(checksum)[0]:
        raise ValueError(
            f"record {record} is damaged: its {length:,} bytes don't match its checksum"
        )


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
