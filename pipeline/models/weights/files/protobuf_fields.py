"""Fields of protocol buffer messages, read within bounds and without copies."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

# Wire types.
VARINT = 0
LENGTH = 2
WIDTHS = {1: 8, 5: 4}
"""Bytes of a field, by the wire types of fixed length."""


class Message:
    """The fields of a message by number.

    Methods return the fields with a number, and raise ValueError for fields of the wrong kind.
    Parameters are as of `read_fields`, also for the messages in this one.
    """

    def __init__(self, message: memoryview, max_fields: int, file_kind: str) -> None:
        self._max_fields = max_fields
        self._file_kind = file_kind
        self.fields: dict[int, list[int | memoryview]] = {}
        for number, value in read_fields(message, max_fields, file_kind):
            self.fields.setdefault(number, []).append(value)

    def contents(self, field_number: int) -> list[memoryview]:
        values = self.fields.get(field_number, [])
        contents = [value for value in values if not isinstance(value, int)]
        if len(contents) < len(values):
            raise ValueError(f"it is not {self._file_kind}")
        return contents

    def content(self, field_number: int) -> memoryview:
        """Return the bytes of the last field; none if the field is missing."""
        return [memoryview(b""), *self.contents(field_number)][-1]

    def messages(self, field_number: int) -> Iterator[Message]:
        for content in self.contents(field_number):
            yield Message(content, self._max_fields, self._file_kind)

    def texts(self, field_number: int) -> tuple[str, ...]:
        return tuple(str(content, "utf-8") for content in self.contents(field_number))

    def text(self, field_number: int) -> str:
        return str(self.content(field_number), "utf-8")

    def integers(self, field_number: int, at_most: int = sys.maxsize) -> list[int]:
        """Return integers, which may be packed into one field.

        Raises ValueError for more than `at_most`, the number of an array's axes.
        """
        integers: list[int] = []
        for value in self.fields.get(field_number, ()):
            if isinstance(value, int):
                integers.append(value)
                continue
            index = 0
            while index < len(value) and len(integers) <= at_most:
                integer, index = decode_varint(value, index, self._file_kind)
                integers.append(integer)
        if len(integers) > at_most:
            raise ValueError("an entry has no possible shape; the file is damaged")
        return integers

    def integer(self, field_number: int, default: int = 0) -> int:
        """Return the last integer. It must not be packed, since a packed field may be large."""
        value = self.fields.get(field_number, [default])[-1]
        if not isinstance(value, int):
            raise ValueError(f"it is not {self._file_kind}")
        return value

    def floats(self, field_number: int, dtype: str) -> np.ndarray:
        """Return floating-point numbers, which may be packed into one field."""
        content = b"".join(self.contents(field_number))
        if len(content) % np.dtype(dtype).itemsize:
            raise ValueError("it ends in the middle of a number")
        return np.frombuffer(content, dtype)


def read_fields(
    message: memoryview, max_fields: int, file_kind: str
) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and the value of each field: an integer, or the field's bytes.

    Raises ValueError for a damaged message, and for more than `max_fields` fields. Messages name
    `file_kind`, the kind of file that is expected, such as "a MindSpore checkpoint".
    """
    index = 0
    num_fields = 0
    while index < len(message):
        num_fields += 1
        if num_fields > max_fields:
            raise ValueError(f"it has an entry of more than {max_fields:,} fields")
        key, index = decode_varint(message, index, file_kind)
        number = key >> 3
        wire_type = key & 7
        if wire_type == VARINT:
            value, index = decode_varint(message, index, file_kind)
            yield number, value
            continue
        if wire_type == LENGTH:
            length, index = decode_varint(message, index, file_kind)
        elif wire_type in WIDTHS:
            length = WIDTHS[wire_type]
        else:
            raise ValueError(f"it is not {file_kind}")
        if length < 0 or index + length > len(message):
            raise ValueError("it ends in the middle of an entry")
        yield number, message[index : index + length]
        index += length


def decode_varint(message: memoryview, index: int, file_kind: str) -> tuple[int, int]:
    """Return the varint at an index, as a signed 64-bit integer, and the index after it.

    A varint has 7 bits per byte, lowest first. Raises ValueError if it doesn't end.
    """
    result = 0
    for position, byte in enumerate(message[index : index + 10]):
        result |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            result &= 2**64 - 1
            signed = result - 2**64 if result >= 2**63 else result
            return signed, index + position + 1
    raise ValueError(f"it ends in the middle of an entry, or is not {file_kind}")
