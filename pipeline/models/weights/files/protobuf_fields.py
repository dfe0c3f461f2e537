"""Fields of protocol buffer messages, read one by one within bounds, without copies."""

from __future__ import annotations

from collections.abc import Iterator

# Wire types.
VARINT = 0
LENGTH = 2
WIDTHS = {1: 8, 5: 4}
"""Bytes of a field, by the wire types of fixed length."""


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
