"""Functions that write a dataset as ArrayRecord files. An interrupted write leaves no folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pipeline.core.errors import RunError, get_system_reason
from pipeline.core.files.atomic_write import commit
from pipeline.data.columns import Column, RawData, Split
from pipeline.data.padding.buckets import RaggedColumn
from pipeline.data.records.record_format import (
    DESCRIPTION,
    RecordColumnSpec,
    RecordFile,
    RecordSplitSpec,
    RecordsSpec,
    encode,
    to_stored_bytes,
)

FILE_BYTES = 256 << 20
"""A column is split into files of about this size."""
NARROW_BYTES = 64
"""The most bytes of a sample that shares a record. Columns of such samples are read into memory."""
SAMPLES_PER_NARROW_RECORD = 4096
CHUNK_SAMPLES = 256
"""Number of samples that are read from the source at once, if each has its own record."""
OPTIONS = "group_size:1,uncompressed"
"""ArrayRecord options that make each record readable without others."""
Notify = Callable[[str, int, int], None]
"""Function that is called after each file: (SPLIT-COLUMN, samples written, all samples)."""


def write_records(
    folder: Path, source: str, data: RawData, *, overwrite: bool, notify: Notify
) -> RecordsSpec:
    """Write both splits of a dataset into `folder`, which appears when it is complete, and return
    the description of the files. `source` is the name of the dataset. Raises RunError if the folder
    can't be written, and if it exists, unless it has records and `overwrite` is true. Raises
    DataError if a sample can't be read."""
    with _replace_folder(folder, overwrite) as scratch:
        spec = RecordsSpec(
            source=source,
            classes=data.classes,
            task=data.targets.task,
            mean=data.targets.mean,
            std=data.targets.std,
            inputs=data.inputs,
            train=_write_split(scratch, "train", data.train, notify),
            eval=_write_split(scratch, "eval", data.eval, notify),
        )
        unused_keys = {"task", "mean", "std"} if spec.task == "classification" else set()
        tree = spec.model_dump(mode="json", exclude_none=True, exclude=unused_keys)
        (scratch / DESCRIPTION).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    return spec


@contextmanager
def _replace_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a scratch folder, which replaces `folder` at the end of the block. After an error
    `folder` is unchanged."""
    require_free(folder, overwrite)
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    previous = folder.with_name(f"{folder.name}.{os.getpid()}.old")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        if folder.exists():
            folder.rename(previous)
        commit(scratch, folder)
    except OSError as error:
        raise RunError(f"{folder}: can't be written: {get_system_reason(error)}") from error
    finally:
        if previous.exists() and not folder.exists():
            previous.rename(folder)
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)


def require_free(folder: Path, overwrite: bool) -> None:
    """Raise RunError if `folder` exists, unless it has records and `overwrite` is true."""
    if not os.path.lexists(folder):
        return
    if not (folder / DESCRIPTION).is_file():
        raise RunError(f"{folder}: exists already and holds no records; name another folder")
    if not overwrite:
        raise RunError(f"{folder}: holds records already; name another folder, or add --overwrite")


def _write_split(folder: Path, split_name: str, split: Split, notify: Notify) -> RecordSplitSpec:
    columns = {
        name: _write_column(folder, f"{split_name}-{name}", column, len(split), notify)
        for name, column in split.columns.items()
    }
    return RecordSplitSpec(samples=len(split), columns=columns)


def _write_column(
    folder: Path, stem: str, column: Column, samples: int, notify: Notify | None
) -> RecordColumnSpec:
    """Write and describe a column. The sizes of a ragged column are written as another column."""
    dtype = np.dtype(column.dtype)
    shape: tuple[int | None, ...] = tuple(column.shape[1:])
    value_bytes = math.prod(column.shape[1:]) * dtype.itemsize
    size_bytes = samples * value_bytes
    per_record = 1
    sizes = None
    if isinstance(column, RaggedColumn):
        lengths = column.sizes.astype(np.int64).prod(axis=1)
        size_bytes = int(lengths.sum()) * math.prod(column.trailing) * dtype.itemsize
        shape = (*[None] * column.sizes.shape[1], *column.trailing)
        sizes = _write_column(folder, f"{stem}.sizes", column.sizes, samples, None)
    elif value_bytes <= NARROW_BYTES:
        per_record = SAMPLES_PER_NARROW_RECORD
    num_files = max(1, -(-size_bytes // FILE_BYTES))
    # Whole records are distributed evenly over the files.
    num_records = -(-samples // per_record)
    ends = [min(samples, num_records * n // num_files * per_record) for n in range(num_files + 1)]
    files = []
    for number in range(num_files):
        name = f"{stem}-{number:05}-of-{num_files:05}.array_record"
        rows = range(ends[number], ends[number + 1])
        files.append(_write_file(folder / name, column, rows, per_record))
        if notify is not None:
            notify(stem, rows.stop, samples)
    return RecordColumnSpec(
        dtype=dtype.name,
        shape=shape,
        samples_per_record=per_record,
        files=tuple(files),
        sizes=sizes,
    )


def _write_file(path: Path, column: Column, rows: range, per_record: int) -> RecordFile:
    """Write the samples `rows` of a column into a file. Raises RunError if it can't be written."""
    from array_record.python.array_record_module import ArrayRecordWriter

    first_crc32 = 0
    try:
        writer = ArrayRecordWriter(str(path), OPTIONS)
        for number, values in enumerate(_read_chunks(column, rows, per_record)):
            if number == 0:
                first_crc32 = zlib.crc32(to_stored_bytes(values))
            writer.write(encode(values, first_crc32, number))
        writer.close()
        size_bytes = path.stat().st_size
    except (RuntimeError, OSError) as error:
        raise RunError(f"{path}: can't be written: {get_system_reason(error)}") from error
    return RecordFile(
        name=path.name, samples=len(rows), size_bytes=size_bytes, first_crc32=first_crc32
    )


def _read_chunks(column: Column, rows: range, per_record: int) -> Iterator[np.ndarray]:
    """Yield the samples of each record, (n, *shape). Several records are read at once."""
    if isinstance(column, RaggedColumn):
        for index in rows:
            yield column.value(index)[np.newaxis]
        return
    chunk = max(per_record, CHUNK_SAMPLES // per_record * per_record)
    for first in range(rows.start, rows.stop, chunk):
        values = column[first : min(first + chunk, rows.stop)]
        for start in range(0, len(values), per_record):
            yield values[start : start + per_record]
