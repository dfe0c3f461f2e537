"""Records of TensorFlow's files: read in order and again, cut short, changed."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pipeline.data.records.tfrecord_file import (
    MAX_RECORD_BYTES,
    compute_masked_checksum,
    read_record,
    scan_records,
)

pytest.importorskip("google_crc32c")

CONTENTS = [b"", b"abc", bytes(range(256)) * 40]


def record(content: bytes) -> bytes:
    """A record as TensorFlow documents it: length, its checksum, the bytes, their checksum."""
    length = struct.pack("<Q", len(content))
    checksums = (struct.pack("<I", compute_masked_checksum(part)) for part in (length, content))
    return length + next(checksums) + content + next(checksums)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"".join(map(record, CONTENTS)))
    return path


def test_masked_checksum_matches_the_definition() -> None:
    crc = 0xE3069283  # CRC-32C of "123456789", the check value of its catalogue
    masked = ((crc >> 15) | (crc << 17)) + 0xA282EAD8
    assert compute_masked_checksum(b"123456789") == masked % 2**32


def test_records_are_read_in_order_and_by_number(file: Path) -> None:
    read = list(scan_records(file))
    assert [content for _, content in read] == CONTENTS
    for number, (start, content) in reversed([*enumerate(read)]):
        assert read_record(file, number, start, len(content)) == CONTENTS[number]


@pytest.mark.parametrize("size", [4, 10, 15, 20])
def test_truncated_file_is_refused(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"record [01] is truncated"):
        list(scan_records(file))


def test_flipped_bit_is_detected(file: Path) -> None:
    whole = file.read_bytes()
    for position in range(40):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"record \d( is damaged|: its length doesn't match)"):
            list(scan_records(file))


def test_record_changed_after_the_scan_is_refused(file: Path) -> None:
    starts = [start for start, _ in scan_records(file)]
    file.write_bytes(file.read_bytes().replace(b"abc", b"abd"))
    with pytest.raises(
        ValueError, match="record 1 is damaged: its 3 bytes don't match its checksum"
    ):
        read_record(file, 1, starts[1], 3)


def test_compressed_file_and_oversized_record_are_refused(file: Path) -> None:
    file.write_bytes(b"\x1f\x8b" + bytes(20))
    with pytest.raises(ValueError, match="is compressed; decompress it with gzip -d"):
        list(scan_records(file))
    length = struct.pack("<Q", MAX_RECORD_BYTES + 1)
    file.write_bytes(length + struct.pack("<I", compute_masked_checksum(length)))
    with pytest.raises(ValueError, match="record 0 has 67,108,865 bytes; at most 67,108,864"):
        list(scan_records(file))
