"""TFRecord files: the positions and bytes of their records, checked by checksums.

A record is its length as uint64, the checksum of the length, the bytes, and the checksum of the
bytes, all little-endian. A checksum is a masked CRC-32C
(https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details").
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from pipeline.core.errors import DataError

MAX_RECORD_BYTES = 2**26
_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8
"""The format's number that is added to a rotated CRC to mask it."""
_GZIP = b"\x1f\x8b"
"""First bytes of a gzip file."""


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
