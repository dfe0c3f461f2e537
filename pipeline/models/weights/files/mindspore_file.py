"""MindSpore's checkpoint files, `.ckpt`.

The format is a protocol buffer message with these field numbers, as in MindSpore's package:

    Checkpoint   1: repeated Value
    Value        1: tag (text)   2: TensorProto   3: MapTensorProto, which is not read
    TensorProto  1: repeated dims (int64)   2: tensor_type (text)   3: tensor_content (bytes)

An array above 512 MiB is spread over several values of one tag. A file may end in `crc_num` and
ten bytes, the CRC-32 of all bytes before it.

Only these fields are parsed, and without the protobuf package. The package would parse the entire
message before any limit could be checked, and copy every array. A file of empty values would take
28 times its size in memory. Here each field is checked, and arrays are views of the file's content.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import MAX_AXES, MAX_ENTRIES
from pipeline.models.weights.files.named_arrays import BFLOAT16, Arrays, add_array, decode_array
from pipeline.models.weights.files.protobuf_fields import LENGTH, VARINT, Message, read_fields

_INTEGERS = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
_TYPES = {
    name: np.dtype(name.lower()).newbyteorder("<")
    for name in ("Bool", *_INTEGERS, "Float16", "Float32", "Float64")
} | {"BFloat16": BFLOAT16}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_TEXT = "str"
"""Type of entries such as epoch counters, which are skipped since they aren't arrays."""

_CRC = b"crc_num"
_CRC_BYTES = 10
# Field numbers.
_VALUE = _TAG = _DIMS = 1
_TENSOR = _TYPE = 2
_MAP = _CONTENT = 3
_KIND = "a MindSpore checkpoint"
_PART_BYTES = 512 * 2**20
"""Most bytes of an array in one value."""
MAX_FIELDS = 64
"""Most fields of a Value or a TensorProto, which may have one per dimension."""


def read_mindspore(data: bytes) -> Arrays:
    """Return the arrays of a `.ckpt` by name. Raises ValueError for a file that isn't valid."""
    tensors: dict[str, list[Message]] = {}
    for number, field in read_fields(memoryview(_strip_crc(data)), MAX_ENTRIES, _KIND):
        if number != _VALUE or isinstance(field, int):
            raise ValueError("it is not a MindSpore checkpoint (or an encrypted one)")
        value = Message(field, MAX_FIELDS, _KIND)
        tag = value.text(_TAG)
        if _MAP in value.fields:
            raise ValueError(f"{show_name(tag)} is a map tensor; only plain arrays can be read")
        if not tag or _TENSOR not in value.fields:
            raise ValueError("an entry has no name or no array; it is not a MindSpore checkpoint")
        tensors.setdefault(tag, []).extend(value.messages(_TENSOR))
    arrays: Arrays = {}
    for tag, parts in tensors.items():
        if parts[0].text(_TYPE) != _TEXT:
            add_array(arrays, tag, _join_parts(tag, parts))
    return arrays


def write_mindspore(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as MindSpore does. Raises ValueError for a dtype that MindSpore doesn't have."""
    with path.open("wb") as file:
        for name, array in arrays.items():
            dtype = array.dtype.newbyteorder("<") if array.dtype != BFLOAT16 else BFLOAT16
            if dtype not in _NAMES:
                raise ValueError(f"{show_name(name)} is {array.dtype}, which a .ckpt can't hold")
            key = _encode_varint(_DIMS << 3 | VARINT)
            # In MindSpore's files a scalar has the dimensions (0,).
            shape = b"".join(key + _encode_varint(size) for size in array.shape or (0,))
            head = shape + _encode_bytes_field(_TYPE, _NAMES[dtype].encode())
            tag = _encode_bytes_field(_TAG, name.encode())
            content = memoryview(array.astype(dtype, copy=False).tobytes())
            for start in range(0, max(1, len(content)), _PART_BYTES):
                part = content[start : start + _PART_BYTES]
                tensor = head + _encode_bytes_field(_CONTENT, part)
                value = tag + _encode_bytes_field(_TENSOR, tensor)
                file.write(_encode_bytes_field(_VALUE, value))


def _strip_crc(data: bytes) -> bytes:
    """Return the message without its checksum. Raises ValueError if the checksum doesn't match."""
    end = len(data) - len(_CRC) - _CRC_BYTES
    if end < 0 or data[end:-_CRC_BYTES] != _CRC:
        return data
    if binascii.crc32(data[:end]) != int.from_bytes(data[-_CRC_BYTES:], "big"):
        raise ValueError("its CRC-32 doesn't match; the file is damaged")
    return data[:end]


def _join_parts(tag: str, parts: list[Message]) -> np.ndarray:
    """Return the array whose parts these are. Raises ValueError if they don't fit together."""
    dims, kind = _read_signature(parts[0])
    if any(_read_signature(part) != (dims, kind) for part in parts):
        raise ValueError(f"the parts of {show_name(tag)} differ in shape or type")
    if kind not in _TYPES:
        types = ", ".join(_TYPES)
        raise ValueError(f"{show_name(tag)} is {show_name(kind)}; must be one of {types}")
    dtype = _TYPES[kind]
    contents = [part.content(_CONTENT) for part in parts]
    content = contents[0] if len(contents) == 1 else b"".join(contents)
    is_scalar = dims == [0] and len(content) == dtype.itemsize
    return decode_array(tag, dtype, [] if is_scalar else dims, content)


def _read_signature(tensor: Message) -> tuple[list[int], str]:
    """Return the dimensions and the type of a TensorProto."""
    return tensor.integers(_DIMS, MAX_AXES), tensor.text(_TYPE)


def _encode_bytes_field(number: int, value: bytes | memoryview) -> bytes:
    return b"".join((_encode_varint(number << 3 | LENGTH), _encode_varint(len(value)), value))


def _encode_varint(value: int) -> bytes:
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)
