"""MindRecord files: what MindSpore wrote is read, and nothing that is damaged (D-13)."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.records.mindrecord_file import (
    INTEGER_BYTES,
    SampleSchema,
    _parse_scalars,
    index_mindrecord,
    unpack_integers,
)
from pipeline.data.records.tfrecord_file import Feature

GOLDEN = Path(__file__).parents[2] / "golden" / "mindrecord.zip"
NAMES = ("train", "eval", "arrays", "tokens", "pages", "scalars")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mindrecord")
    with ZipFile(GOLDEN) as archive:
        archive.extractall(folder)
    return folder


def read(path: Path) -> list[Mapping[str, Feature]]:
    samples: list[Mapping[str, Feature]] = []
    index_mindrecord(path, lambda record, fields: samples.append(fields))
    return samples


def to_json(value: Feature) -> Any:
    """A value as make_mindrecord.py writes it."""
    if isinstance(value, tuple):
        return {"bytes": value[0].hex()}
    return {"dtype": value.dtype.name, "shape": list(value.shape), "values": value.ravel().tolist()}


@pytest.mark.parametrize("name", NAMES)
def test_samples_match_mindspore_golden(golden: Path, name: str) -> None:
    """What MindSpore's FileReader returns, in its order, of every file."""
    expected = json.loads((golden / "values.json").read_text())[f"{name}.mindrecord"]
    paths = sorted(path for path in golden.glob(f"{name}*") if path.suffix != ".db")
    samples = [sample for path in paths for sample in read(path)]
    assert len(samples) == len(expected) > 0
    for sample, values in zip(samples, expected, strict=True):
        assert set(sample) == set(values)
        for key, value in values.items():
            feature = sample[key]
            if isinstance(value, dict):
                assert to_json(feature) == value
            elif isinstance(value, str):
                assert feature == (value.encode(),)
            else:
                assert np.asarray(feature).tolist() == [value]


def copy(golden: Path, folder: Path, name: str = "arrays") -> Path:
    for suffix in ("", ".db"):
        (folder / f"train{suffix}").write_bytes(
            (golden / f"{name}.mindrecord{suffix}").read_bytes()
        )
    return folder / "train"


def change_header(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + size].replace(old, new)
        assert header != content[8 : 8 + size]
        rest = content[8 + size :]
        path.write_bytes(struct.pack("<Q", len(header)) + header + rest[len(header) - size :])

    return change


def change_index(*statements: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with sqlite3.connect(f"{path}.db") as database:
            for statement in statements:
                database.execute(statement)
        database.close()

    return change


def change_byte(position: int, value: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position] = value
        path.write_bytes(bytes(content))

    return change


PAGE = 1 << 14
ENDLESS = (
    "DROP TABLE INDEXES",
    "CREATE VIEW INDEXES AS WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) "
    "SELECT i AS ROW_ID, i AS PAGE_ID_RAW, i AS PAGE_OFFSET_RAW, i AS PAGE_OFFSET_RAW_END, "
    "i AS PAGE_ID_BLOB, i AS PAGE_OFFSET_BLOB, i AS PAGE_OFFSET_BLOB_END FROM n",
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: Path(f"{path}.db").unlink(), "needs its index train.db"),
        (lambda path: Path(f"{path}.db").write_bytes(b"no database" * 99), "index .* is damaged"),
        (lambda path: Path(f"{path}.db").write_bytes(b""), "no such table: INDEXES"),
        (change_index(*ENDLESS), "is damaged: interrupted"),
        pytest.param(
            change_index("UPDATE INDEXES SET PAGE_ID_RAW = zeroblob(90000000)"),
            "too big",
            marks=pytest.mark.slow,
        ),
        (change_index("UPDATE INDEXES SET ROW_ID = 9 WHERE ROW_ID = 1"), "samples are missing"),
        (change_index("UPDATE INDEXES SET PAGE_ID_BLOB = 'x'"), "index .* is damaged"),
        (change_index("UPDATE INDEXES SET PAGE_ID_RAW = 7"), "record 0 is outside the file"),
        (change_index("UPDATE INDEXES SET PAGE_ID_RAW = -1"), "record 0 is outside the file"),
        (
            change_index("UPDATE INDEXES SET PAGE_OFFSET_BLOB = 9223372036854775807"),
            "is outside the file",
        ),
        (
            change_index("UPDATE INDEXES SET PAGE_OFFSET_RAW_END = -9223372036854775808"),
            "is outside the file",
        ),
        (
            change_index("UPDATE INDEXES SET PAGE_OFFSET_BLOB_END = PAGE_OFFSET_BLOB_END + 1"),
            "record 0 is damaged: a row of 1.. bytes, and 1.. in the index",
        ),
        (change_header(b'"version":"3.0"', b'"version":"2.0"'), "of version '2.0'; 3.0 is read"),
        (change_header(b'"int32"', b'"int99"'), "its header is damaged"),
        (change_header(b'"page_size":32768', b'"page_size":-1'), "its header is damaged"),
        (change_header(b'"header_size":16384', b'"header_size":16383'), "record 0 is damaged"),
        (change_header(b"{", b"["), "its header is damaged"),
        (change_header(b'"type":"bytes"', b'"type":"int32"'), "blob_fields: must be the bytes"),
        (change_header(b'"shape":[2,3]', b'"shape":[2,4]'), "record 0 is damaged: f32: cannot"),
        (lambda path: path.write_bytes(b"\xff" * 400), "isn't a MindRecord file"),
        (lambda path: path.write_bytes(b""), "isn't a MindRecord file"),
        (lambda path: os.truncate(path, PAGE + 40), "is outside the file"),
        (lambda path: path.write_bytes(path.read_bytes() + b"ENCRYPT"), "is encrypted"),
        (change_byte(PAGE, 200), "record 0 is damaged: a row of 200 bytes"),
        (change_byte(PAGE + 8, 255), "record 0 is damaged: f32 has 18,374"),
        (change_byte(PAGE + (1 << 15) + 8, 0x94), "record 0 is damaged"),
    ],
)
def test_damaged_file_error_has_one_line(
    golden: Path, tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    path = copy(golden, tmp_path)
    change(path)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_all_shards_are_required(golden: Path, tmp_path: Path) -> None:
    for name in ("train.mindrecord0", "train.mindrecord0.db", "train.mindrecord2"):
        (tmp_path / name).write_bytes((golden / name).read_bytes())
    with pytest.raises(ValueError, match=r"is one of 3 files; train.mindrecord1 is missing"):
        read(tmp_path / "train.mindrecord0")


@pytest.mark.slow
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_flipped_bit_is_an_error_or_a_changed_value(
    golden: Path, tmp_path: Path, place: float, bit: int
) -> None:
    """MindRecord has no checksums, so a changed value can't be found."""
    path = copy(golden, tmp_path)
    content = bytearray(path.read_bytes())
    used = [*range(1300), *range(PAGE, PAGE + 800), *range(PAGE + 2**15, len(content))]
    content[used[int(place * len(used))]] ^= 1 << bit
    path.write_bytes(bytes(content))
    with suppress(ValueError):
        assert len(read(path)) == 4


def test_memory_is_bounded_by_file_size() -> None:
    """Sizes that lie are refused before values are made of them."""
    count = 40_000_000
    tracemalloc.start()
    with pytest.raises(ValueError, match="40,000,000 integers don't fit 10,000,004 bytes"):
        unpack_integers(count.to_bytes(4, "big") + bytes(count // 4))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2.1e7


def test_scalar_lists_are_refused() -> None:
    """A list of empty lists takes a byte for each in a row, and 56 in memory."""
    schema = SampleSchema.model_validate({"schema": {"x": {"type": "int32"}}, "blob_fields": []})
    with pytest.raises(ValueError, match="max_array_len"):
        list(_parse_scalars(b"\x93\x90\x90\x90", schema))


@pytest.mark.medium
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_packed_integers_round_trip(values: list[int]) -> None:
    """The inverse, written from the description of the format."""
    codes = [
        next(c for c, n in enumerate(INTEGER_BYTES) if -(1 << 8 * n - 1) <= v < 1 << 8 * n - 1)
        for v in values
    ]
    bits = "".join(f"{code:02b}" for code in codes)
    bits += "0" * (-len(bits) % 8)
    packed = len(values).to_bytes(4, "big") + bytes(
        int(bits[first : first + 8], 2) for first in range(0, len(bits), 8)
    )
    packed += b"".join(
        value.to_bytes(INTEGER_BYTES[code], "little", signed=True)
        for value, code in zip(values, codes, strict=True)
    )
    assert unpack_integers(packed).tolist() == values
    for wrong in (packed[:-1], packed + b"x"):
        with pytest.raises(ValueError, match="integers don't"):
            unpack_integers(wrong)
