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
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from pipeline.core.files.error_text import show_name
from pipeline.core.files.npy import MAX_AXES, MAX_ENTRIES
from pipeline.models.weights.files.named_arrays import BFLOAT16, Arrays, add_array, decode_array
from pipeline.models.weights.files.protobuf_fields import LENGTH, VARINT, decode_varint, read_fields

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


@dataclass(frozen=True)
class _Value:
    """One value of the message: an array, or a part of a large array."""

    tag: str
    dims: tuple[int, ...]
    type: str
    content: memoryview


def read_mindspore(data: bytes) -> Arrays:
    """Return the arrays of a `.ckpt` by name. Raises ValueError for a file that isn't valid."""
    parts: dict[str, list[_Value]] = {}
    for number, field in read_fields(memoryview(_strip_crc(data)), MAX_ENTRIES, _KIND):
        if number != _VALUE or isinstance(field, int):
            raise ValueError("it is not a MindSpore checkpoint (or an encrypted one)")
        value = _read_value(field)
        parts.setdefault(value.tag, []).append(value)
    arrays: Arrays = {}
    for tag, values in parts.items():
        if values[0].type != _TEXT:
            add_array(arrays, tag, _join_parts(values))
    return arrays


def write_mindspore(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as MindSpore does. Raises ValueError for a dtype that MindSpore doesn't have."""
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("<") if array.dtype != BFLOAT16 else BFLOAT16
        if dtype not in _NAMES:
            raise ValueError(f"{show_name(name)} is {array.dtype}, which a .ckpt can't hold")
        key = _encode_varint(_DIMS << 3 | VARINT)
        # In MindSpore's files a scalar has the dimensions (0,).
        dims = b"".join(key + _encode_varint(size) for size in array.shape or (0,))
        content = memoryview(array.astype(dtype, copy=False).tobytes())
        for start in range(0, max(1, len(content)), _PART_BYTES):
            part = content[start : start + _PART_BYTES]
            tensor = (
                dims
                + _encode_bytes_field(_TYPE, _NAMES[dtype].encode())
                + _encode_bytes_field(_CONTENT, part)
            )
            value = _encode_bytes_field(_TAG, name.encode()) + _encode_bytes_field(_TENSOR, tensor)
            file.write(_encode_bytes_field(_VALUE, value))


def _strip_crc(data: bytes) -> bytes:
    """Return the message without its checksum. Raises ValueError if the checksum doesn't match."""
    end = len(data) - len(_CRC) - _CRC_BYTES
    if end < 0 or data[end:-_CRC_BYTES] != _CRC:
        return data
    if binascii.crc32(data[:end]) != int.from_bytes(data[-_CRC_BYTES:], "big"):
        raise ValueError("its CRC-32 doesn't match; the file is damaged")
    return data[:end]


def _read_value(message: memoryview) -> _Value:
    """Parse a Value. Raises ValueError if it isn't an array with a name."""
    tag = ""
    tensor = None
    for number, field in read_fields(message, MAX_FIELDS, _KIND):
        if number == _MAP:
            raise ValueError(f"{show_name(tag)} is a map tensor; only plain arrays can be read")
        if number == _TAG and not isinstance(field, int):
            tag = str(field, "utf-8")
        elif number == _TENSOR and not isinstance(field, int):
            tensor = field
    if not tag or tensor is None:
        raise ValueError("an entry has no name or no array; it is not a MindSpore checkpoint")
    dims: list[int] = []
    kind = ""
    content = memoryview(b"")
    for number, field in read_fields(tensor, MAX_FIELDS, _KIND):
        if number == _DIMS:
            dims += [field] if isinstance(field, int) else _read_packed(field)
        elif number == _TYPE and not isinstance(field, int):
            kind = str(field, "utf-8")
        elif number == _CONTENT and not isinstance(field, int):
            content = field
    return _Value(tag, tuple(dims), kind, content)


def _join_parts(values: list[_Value]) -> np.ndarray:
    """Return the array whose parts these are. Raises ValueError if they don't fit together."""
    first = values[0]
    if any((value.dims, value.type) != (first.dims, first.type) for value in values):
        raise ValueError(f"the parts of {show_name(first.tag)} differ in shape or type")
    if first.type not in _TYPES:
        types = ", ".join(_TYPES)
        raise ValueError(
            f"{show_name(first.tag)} is {show_name(first.type)}; must be one of {types}"
        )
    dtype = _TYPES[first.type]
    content = first.content if len(values) == 1 else b"".join(v.content for v in values)
    is_scalar = first.dims == (0,) and len(content) == dtype.itemsize
    return decode_array(first.tag, dtype, () if is_scalar else first.dims, content)


def _read_packed(field: memoryview) -> list[int]:
    """Return the integers of a packed field. Raises ValueError for more than an array's axes."""
    numbers: list[int] = []
    index = 0
    while index < len(field):
        if len(numbers) > MAX_AXES:
            raise ValueError("an entry has no possible shape; the file is damaged")
        number, index = decode_varint(field, index, _KIND)
        numbers.append(number)
    return numbers


def _encode_bytes_field(number: int, value: bytes | memoryview) -> bytes:
    return b"".join((_encode_varint(number << 3 | LENGTH), _encode_varint(len(value)), value))


def _encode_varint(value: int) -> bytes:
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)
