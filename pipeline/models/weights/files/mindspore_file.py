"""MindSpore's checkpoint files, `.ckpt`.

The format is a protocol buffer message, here by field number as its installed package defines it:

    Checkpoint   1: repeated Value
    Value        1: tag (text)   2: TensorProto   3: MapTensorProto, which is not read
    TensorProto  1: repeated dims (int64)   2: tensor_type (text)   3: tensor_content (bytes)

An array above 512 MiB is spread over several values of one tag. A file may end in `crc_num` and
ten bytes, the CRC-32 of all bytes before it.

Only these few fields are parsed, without the protobuf package: it builds the entire message before
any bound can be checked (28 bytes of memory per byte of a file of empty values) and copies every
array. Here fields are checked one by one, and arrays are views of the file's content.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from pipeline.core.files.error_text import shown
from pipeline.core.files.npy import MAX_AXES, MAX_ENTRIES
from pipeline.models.weights.files.named_arrays import BFLOAT16, Arrays, add, decode

_INTEGERS = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
_TYPES = {
    name: np.dtype(name.lower()).newbyteorder("<")
    for name in ("Bool", *_INTEGERS, "Float16", "Float32", "Float64")
} | {"BFloat16": BFLOAT16}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_TEXT = "str"
"""Type of entries such as epoch counters; no arrays, so they are skipped."""

_CRC = b"crc_num"
_CRC_BYTES = 10
_VALUE = _TAG = _DIMS = 1
_TENSOR = _TYPE = 2
_MAP = _CONTENT = 3
_VARINT = 0
_LENGTH = 2
_WIDTHS = {1: 8, 5: 4}
"""Bytes of the wire types of a fixed length."""
_PART_BYTES = 512 * 2**20
MAX_FIELDS = 64
"""Fields of a value, or of the array in it, which may have a field per dimension."""


@dataclass(frozen=True)
class _Value:
    """One value of the message: an array, or a part of a large one."""

    tag: str
    dims: tuple[int, ...]
    type: str
    content: memoryview


def read_mindspore(data: bytes) -> Arrays:
    """Return the arrays of a `.ckpt`. Raises ValueError that says what is wrong with the file."""
    parts: dict[str, list[_Value]] = {}
    for number, field in _fields(memoryview(_strip_crc(data)), MAX_ENTRIES):
        if number != _VALUE or isinstance(field, int):
            raise ValueError("it is not a MindSpore checkpoint (or an encrypted one)")
        value = _read_value(field)
        parts.setdefault(value.tag, []).append(value)
    arrays: Arrays = {}
    for tag, values in parts.items():
        if values[0].type != _TEXT:
            add(arrays, tag, _join(values))
    return arrays


def write_mindspore(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as MindSpore does. Raises ValueError for a dtype that MindSpore lacks."""
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("<") if array.dtype != BFLOAT16 else BFLOAT16
        if dtype not in _NAMES:
            raise ValueError(f"{name} is {array.dtype}, which a .ckpt can't hold")
        dims = b"".join(_number(_DIMS, size) for size in array.shape or (0,))
        content = memoryview(array.astype(dtype, copy=False).tobytes())
        for start in range(0, max(1, len(content)), _PART_BYTES):
            part = content[start : start + _PART_BYTES]
            tensor = dims + _bytes(_TYPE, _NAMES[dtype].encode()) + _bytes(_CONTENT, part)
            value = _bytes(_TAG, name.encode()) + _bytes(_TENSOR, tensor)
            file.write(_bytes(_VALUE, value))


def _strip_crc(data: bytes) -> bytes:
    """Return the message without its checksum. Raises ValueError if the checksum doesn't match."""
    end = len(data) - len(_CRC) - _CRC_BYTES
    if end < 0 or data[end:-_CRC_BYTES] != _CRC:
        return data
    if binascii.crc32(data[:end]) != int.from_bytes(data[-_CRC_BYTES:], "big"):
        raise ValueError("its CRC is another; the file is damaged")
    return data[:end]


def _read_value(message: memoryview) -> _Value:
    tag = ""
    tensor = None
    for number, field in _fields(message, MAX_FIELDS):
        if number == _MAP:
            raise ValueError(f"{shown(tag)} is a map tensor; only plain arrays can be read")
        if number == _TAG and not isinstance(field, int):
            tag = str(field, "utf-8")
        elif number == _TENSOR and not isinstance(field, int):
            tensor = field
    if not tag or tensor is None:
        raise ValueError("an entry has no name or no array; it is not a MindSpore checkpoint")
    dims: list[int] = []
    kind = ""
    content = memoryview(b"")
    for number, field in _fields(tensor, MAX_FIELDS):
        if number == _DIMS:
            dims += [field] if isinstance(field, int) else _read_packed(field)
        elif number == _TYPE and not isinstance(field, int):
            kind = str(field, "utf-8")
        elif number == _CONTENT and not isinstance(field, int):
            content = field
    return _Value(tag, tuple(dims), kind, content)


def _join(values: list[_Value]) -> np.ndarray:
    """Join all parts of one tag into an array."""
    first = values[0]
    if any((value.dims, value.type) != (first.dims, first.type) for value in values):
        raise ValueError(f"the parts of {shown(first.tag)} differ in shape or type")
    if first.type not in _TYPES:
        types = ", ".join(_TYPES)
        raise ValueError(f"{shown(first.tag)} is {shown(first.type)}; must be one of {types}")
    dtype = _TYPES[first.type]
    content = first.content if len(values) == 1 else b"".join(v.content for v in values)
    scalar = first.dims == (0,) and len(content) == dtype.itemsize
    return decode(first.tag, dtype, () if scalar else first.dims, content)


def _fields(message: memoryview, at_most: int) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the fields of a message: number, and an integer or the bytes of a field."""
    at = count = 0
    while at < len(message):
        count += 1
        if count > at_most:
            raise ValueError(f"it has an entry of more than {at_most:,} fields")
        key, at = _read_number(message, at)
        number = key >> 3
        wire = key & 7
        if wire == _VARINT:
            value, at = _read_number(message, at)
            yield number, value
            continue
        if wire == _LENGTH:
            length, at = _read_number(message, at)
        elif wire in _WIDTHS:
            length = _WIDTHS[wire]
        else:
            raise ValueError("it is not a MindSpore checkpoint")
        if length < 0 or at + length > len(message):
            raise ValueError("it ends in the middle of an entry")
        yield number, message[at : at + length]
        at += length


def _read_number(message: memoryview, at: int) -> tuple[int, int]:
    """Decode a varint: a signed 64-bit integer, 7 bits per byte, lowest first; and its end."""
    result = 0
    for count, byte in enumerate(message[at : at + 10]):
        result |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            result &= 2**64 - 1
            return result - 2**64 if result >= 2**63 else result, at + count + 1
    raise ValueError("it ends in the middle of an entry, or is not a MindSpore checkpoint")


def _read_packed(field: memoryview) -> list[int]:
    numbers: list[int] = []
    at = 0
    while at < len(field):
        if len(numbers) > MAX_AXES:
            raise ValueError("an entry has no possible shape; the file is damaged")
        number, at = _read_number(field, at)
        numbers.append(number)
    return numbers


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _bytes(number: int, value: bytes | memoryview) -> bytes:
    return b"".join((_varint(number << 3 | _LENGTH), _varint(len(value)), value))


def _varint(value: int) -> bytes:
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)
