"""MindRecord files of MindSpore: their header, index and samples.

    NAME       a header: its length as uint64, and JSON with the schema and the sizes of pages;
               pages of one size, with rows of blobs (bytes and arrays), or rows of scalars
    NAME.db    SQLite: the table INDEXES with the page and the bytes of both rows of each sample

A row is its length as uint64 and its content. Scalars are a map in MessagePack. Before each blob is
its length as big-endian uint64, unless a sample has only one blob. An array of integers consists of
their number as big-endian uint32, a code of two bits for the size of each integer, and 1, 2, 4 or 8
bytes for each. Other numbers are little-endian. Source: files of MindSpore 2.10
(tests/golden/make_mindrecord.py).
"""

from __future__ import annotations

import operator
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from pipeline.core.errors import limit_problems
from pipeline.core.files.error_text import describe_problems
from pipeline.core.files.name_text import show_name
from pipeline.core.registry import Seq
from pipeline.data.records.tfrecord_file import Feature, Visit

VERSION = "3.0"
"""The version of the format that is read."""
MAX_HEADER_BYTES = 2**26
MAX_ROW_BYTES = 2**26
INTEGER_BYTES = (1, 2, 4, 8)
"""Bytes of an integer in an array, by its code of two bits."""
_LENGTH_BYTES = 8
_ENCRYPTED = b"ENCRYPT"
"""Last bytes of an encrypted file."""
_INDEX_QUERY = """SELECT ROW_ID, PAGE_ID_RAW, PAGE_OFFSET_RAW, PAGE_OFFSET_RAW_END,
    PAGE_ID_BLOB, PAGE_OFFSET_BLOB, PAGE_OFFSET_BLOB_END FROM INDEXES"""
_STEPS_PER_CHECK = 1000
"""Number of instructions of SQLite's virtual machine between two checks of the limit on them."""
_MAX_VALUE_BYTES = 2**20
"""Largest text, bytes or row of an index."""
Bytes = Annotated[int, Field(gt=0, lt=2**40)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class FieldSchema(_Model):
    """The type of a field, and the shape of an array, in which -1 stands for any length."""

    type: Literal["int32", "int64", "float32", "float64", "string", "bytes"]
    shape: Seq[int] | None = None

    @property
    def is_blob(self) -> bool:
        """Whether values are bytes or an array."""
        return self.type == "bytes" or self.shape is not None


class SampleSchema(_Model):
    """The fields of a sample, by name, and the names of the blobs in the order of their row."""

    fields: Mapping[str, FieldSchema] = Field(alias="schema")
    blob_fields: Seq[str]

    @model_validator(mode="after")
    def _require_blobs(self) -> Self:
        blobs = {name for name, field in self.fields.items() if field.is_blob}
        if set(self.blob_fields) != blobs or len(self.blob_fields) != len(blobs):
            raise ValueError("blob_fields: must be the bytes and arrays of the schema")
        return self


class Header(_Model):
    """The description at the start of a file."""

    header_size: Bytes
    page_size: Bytes
    schemas: Seq[SampleSchema] = Field(alias="schema", min_length=1, max_length=1)
    shard_addresses: Seq[str]


@dataclass(frozen=True)
class MindRecordFile:
    """A file whose index was read. Samples are read one by one."""

    path: Path
    schema: SampleSchema
    spans: np.ndarray
    """First byte and end of the scalars and of the blobs of each sample, int64 (samples, 4)."""

    def read_example(self, record: int) -> Mapping[str, Feature]:
        """Return the fields of a sample, by name: bytes (strings in UTF-8), or an array in the
        field's dtype and shape, (1,) for a scalar. Raises OSError, and ValueError for damage."""
        start, end, blob_start, blob_end = self.spans[record].tolist()
        with self.path.open("rb") as file:
            scalars = _read_row(file, start, end)
            blobs = _read_row(file, blob_start, blob_end)
        return dict([*_parse_scalars(scalars, self.schema), *_parse_blobs(blobs, self.schema)])


def index_mindrecord(path: Path, visit: Visit) -> MindRecordFile:
    """Call `visit` for each sample, and return the indexed file. Raises OSError and ValueError."""
    size = path.stat().st_size
    header = _read_header(path, size)
    shards = [Path(address).name for address in header.shard_addresses]
    if len(shards) > 1:
        for name in shards:
            if not path.with_name(name).is_file():
                raise ValueError(f"is one of {len(shards)} files; {show_name(name)} is missing")
    spans = _locate_samples(_read_index(path.with_name(f"{path.name}.db")), header, size)
    file = MindRecordFile(path, header.schemas[0], spans)
    for record in range(len(spans)):
        try:
            fields = file.read_example(record)
        except ValueError as error:
            raise ValueError(f"record {record} is damaged: {error}") from error
        visit(record, fields)
    return file


def _read_header(path: Path, size: int) -> Header:
    """Read the header of a file of `size` bytes. Raises ValueError if it isn't valid."""
    with path.open("rb") as file:
        file.seek(max(size - len(_ENCRYPTED), 0))
        if file.read() == _ENCRYPTED:
            raise ValueError("is encrypted; write it without set_enc_key")
        file.seek(0)
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 2 <= length <= min(size - _LENGTH_BYTES, MAX_HEADER_BYTES):
            raise ValueError(f"isn't a MindRecord file: a header of {length:,} bytes")
        content = file.read(length)
    try:
        tree = from_json(content)
    except ValueError as error:
        raise ValueError(f"isn't a MindRecord file, or its header is damaged: {error}") from error
    version = tree.get("version") if isinstance(tree, dict) else None
    if version != VERSION:
        raise ValueError(f"is a MindRecord file of version {version!r:.20}; {VERSION} is read")
    try:
        return Header.model_validate(tree)
    except ValidationError as error:
        problems = "; ".join(limit_problems(describe_problems(error, tree)))
        raise ValueError(f"its header is damaged: {problems}") from error


def _read_index(index: Path) -> np.ndarray:
    """Return the rows of `_INDEX_QUERY` in the order of samples, int64 (samples, 7). Raises
    ValueError for a missing or damaged index."""
    if not index.is_file():
        raise ValueError(f"needs its index {show_name(index.name)} in the same folder")
    # A hostile database may compute endless rows or huge values. So SQLite may run a million
    # instructions, and 100 more for each byte, and values have at most `_MAX_VALUE_BYTES`.
    checks_left = iter(range(1000 + index.stat().st_size // 10))

    def is_over_limit() -> bool:
        return next(checks_left, None) is None

    try:
        uri = f"{index.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
            database.set_progress_handler(is_over_limit, _STEPS_PER_CHECK)
            values = chain.from_iterable(database.execute(_INDEX_QUERY))
            rows = np.fromiter(map(operator.index, values), np.int64)
    except (sqlite3.Error, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(f"its index {show_name(index.name)} is damaged: {error}") from error
    rows = rows.reshape(-1, 7)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if not np.array_equal(rows[:, 0], np.arange(len(rows))):
        raise ValueError(f"its index {show_name(index.name)} is damaged: samples are missing")
    return rows


def _locate_samples(rows: np.ndarray, header: Header, size: int) -> np.ndarray:
    """Return the `spans` of a file of `size` bytes, from the rows of its index. Raises ValueError
    for a sample outside of the file."""
    num_pages = max(size - header.header_size, 0) // header.page_size + 1
    spans = []
    for first_column in (1, 4):  # the columns of the scalars, and of the blobs
        page, start, end = rows[:, first_column : first_column + 3].T
        is_inside = (page >= 0) & (page < num_pages) & (start >= 0) & (end <= header.page_size)
        page_start = header.header_size + np.where(is_inside, page, 0) * header.page_size
        is_inside &= (start < end) & (end - start >= _LENGTH_BYTES) & (end <= size - page_start)
        if not is_inside.all():
            record = int(np.flatnonzero(~is_inside)[0])
            raise ValueError(
                f"record {record} is outside the file: bytes {start[record]:,} to "
                f"{end[record]:,} of page {page[record]:,}; the index is of another file, or the "
                "file is truncated"
            )
        spans += [page_start + start, page_start + end]
    return np.stack(spans, axis=1)


def _read_row(file: BinaryIO, start: int, end: int) -> bytes:
    """Return the content of a row. Raises ValueError if its length differs from the index."""
    if end - start > MAX_ROW_BYTES:
        raise ValueError(f"it has {end - start:,} bytes; at most {MAX_ROW_BYTES:,} are read")
    file.seek(start)
    row = file.read(end - start)
    length = int.from_bytes(row[:_LENGTH_BYTES], "little")
    indexed_length = end - start - _LENGTH_BYTES
    if length != indexed_length or len(row) != end - start:
        raise ValueError(f"a row of {length:,} bytes, and {indexed_length:,} in the index")
    return row[_LENGTH_BYTES:]


def _parse_scalars(content: bytes, schema: SampleSchema) -> Iterator[tuple[str, Feature]]:
    """Yield names and values of scalars. Raises ValueError for a missing value or another type."""
    import msgpack

    # Arrays are blobs. A hostile row may have millions of them.
    values = msgpack.unpackb(content, max_array_len=0, max_map_len=len(schema.fields))
    for name, field in schema.fields.items():
        if field.is_blob:
            continue
        value = values.get(name) if isinstance(values, dict) else None
        types = {"s": (str,), "i": (int,), "f": (int, float)}[field.type[0]]
        if not isinstance(value, types) or isinstance(value, bool):
            raise ValueError(f"{show_name(name)} isn't {field.type}")
        if isinstance(value, str):
            yield name, (value.encode(),)
            continue
        try:
            yield name, np.array([value], field.type)
        except OverflowError as error:
            raise ValueError(str(error)) from error


def _parse_blobs(content: bytes, schema: SampleSchema) -> Iterator[tuple[str, Feature]]:
    """Yield names and values of blobs. Raises ValueError for a wrong length or shape."""
    position = 0
    for name in schema.blob_fields:
        field = schema.fields[name]
        length = len(content)
        if len(schema.blob_fields) > 1:  # a single blob has no length before it
            length = int.from_bytes(content[position : position + _LENGTH_BYTES], "big")
            position += _LENGTH_BYTES
        if position + length > len(content):
            raise ValueError(f"{show_name(name)} has {length:,} bytes, more than its row")
        blob = content[position : position + length]
        position += length
        yield name, (blob,) if field.type == "bytes" else _parse_array(name, blob, field)


def _parse_array(name: str, blob: bytes, field: FieldSchema) -> np.ndarray:
    """Return an array in the dtype and shape of its field. Raises ValueError, beginning with the
    field's name, if the bytes don't fit them."""
    try:
        if field.type.startswith("int"):
            values = unpack_integers(blob).astype(field.type)
        else:
            values = np.frombuffer(blob, np.dtype(field.type).newbyteorder("<")).astype(field.type)
        return values.reshape(field.shape or (-1,))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{show_name(name)}: {error}") from error


def unpack_integers(blob: bytes) -> np.ndarray:
    """Return integers that are stored in as few bytes as each needs, int64 (n,). Raises ValueError
    if their number or sizes don't match the bytes."""
    count = int.from_bytes(blob[:4], "big")
    first = 4 + -(-count // 4)  # after 4 bytes of the count, and a byte for each four codes
    data = np.frombuffer(blob, np.uint8)
    if first + count > len(data):
        raise ValueError(f"{count:,} integers don't fit {len(data):,} bytes")
    codes = (data[4:first, None] >> np.array([6, 4, 2, 0], np.uint8) & 3).ravel()[:count]
    ends = first + np.cumsum(np.array(INTEGER_BYTES)[codes])
    if len(data) != (ends[-1] if count else first):
        raise ValueError(f"{count:,} integers don't fill {len(data):,} bytes")
    values = np.empty(count, np.int64)
    for code, size in enumerate(INTEGER_BYTES):
        mask = codes == code
        parts = data[ends[mask, None] + np.arange(-size, 0)]
        values[mask] = parts.reshape(-1).view(f"<i{size}")
    return values
