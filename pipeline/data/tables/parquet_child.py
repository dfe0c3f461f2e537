"""Child process of `read_parquet`, which reads with pyarrow."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.files.error_text import show_name
from pipeline.core.host.limited_child import serve

OPEN = b"o"
READ = b"r"
"""Kinds of requests."""
LENGTH = struct.Struct("<Q")
"""The number of bytes before each piece of an answer."""


class _File:
    """The opened file."""

    path: Path
    texts: Sequence[str]
    """Names of the columns of texts, which are read as dictionaries."""

    def compute(self, kind: bytes, content: bytes) -> list[bytes | memoryview]:
        """Return the answer to a request. OPEN has a path as JSON; the answer is {"names", "rows"}
        as JSON. READ has {name: whether to read as text} as JSON; the answer has the columns."""
        import pyarrow as pa

        request = json.loads(content)
        try:
            if kind == OPEN:
                return [json.dumps(self._open(Path(request))).encode()]
            table = self._read(list(request))
        except MemoryError:
            raise
        # pyarrow raises OSError without an errno for a damaged file.
        except (pa.ArrowException, OSError) as error:
            lines = map(str.strip, str(error).splitlines())
            reason = next(filter(None, lines), type(error).__name__)
            raise ValueError(f"can't be read as Parquet: {reason}") from error
        columns = (
            _encode_column(name, table.column(name), is_text) for name, is_text in request.items()
        )
        return [piece for column in columns for piece in column]

    def _open(self, path: Path) -> dict[str, Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
        text_types = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
        self.path = path
        self.texts = [
            field.name for field in schema if any(kind(field.type) for kind in text_types)
        ]
        return {"names": schema.names, "rows": metadata.num_rows}

    def _read(self, names: list[str]) -> Any:
        """Return a pyarrow table of some columns."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        texts = [name for name in names if name in self.texts]
        try:
            # Repeated texts are read once.
            with pq.ParquetFile(self.path, read_dictionary=texts) as file:
                return file.read(columns=names, use_threads=False)
        except (pa.ArrowException, OSError):
            # Some encodings don't support dictionaries. Other errors are raised again.
            with pq.ParquetFile(self.path) as file:
                return file.read(columns=names, use_threads=False)


def _encode_column(name: str, values: Any, is_text: bool) -> list[bytes | memoryview]:
    """Return the bytes of a column: n and float64, or t, int32 codes and texts as JSON. Each piece
    after the letter follows its `LENGTH`. Numbers become texts with `is_text`. Texts are in the
    order of first occurrence. Raises ValueError for values that are neither numbers nor texts."""
    import pyarrow as pa

    dtype = values.type
    is_number = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    if any(is_kind(dtype) for is_kind in is_number) and not is_text:
        numbers = values.cast(pa.float64(), safe=False).to_numpy()
        return [b"n", *_add_length(np.ascontiguousarray(numbers, np.float64))]
    try:
        if not pa.types.is_dictionary(dtype):
            values = values.cast(pa.string()).dictionary_encode()
        chunks = values.unify_dictionaries().chunks or [values.combine_chunks()]
        # A dictionary may have repeated and unused texts.
        texts = chunks[0].dictionary.cast(pa.string()).dictionary_encode()
        codes = np.concatenate(
            [
                texts.indices.take(chunk.indices).fill_null(-1).to_numpy(zero_copy_only=False)
                for chunk in chunks
            ]
        )
        used, first_rows = np.unique(codes[codes >= 0], return_index=True)
        used = used[np.argsort(first_rows)]
        names = texts.dictionary.take(pa.array(used, pa.int32())).to_pylist()
    except pa.ArrowException:
        raise ValueError(f"{show_name(name)} is {dtype}; must be numbers or texts") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{show_name(name)} has a text that is not UTF-8") from error
    numbers = np.full(len(texts.dictionary) + 1, -1, np.int32)
    numbers[used] = np.arange(len(used))
    return [b"t", *_add_length(numbers[codes]), *_add_length(json.dumps(names).encode())]


def _add_length(content: Any) -> list[bytes | memoryview]:
    """Return the number of bytes of an array or of bytes, and the bytes."""
    view = memoryview(content)
    # An empty view can't be cast.
    return [LENGTH.pack(view.nbytes), view.cast("B") if view.nbytes else b""]


if __name__ == "__main__":
    serve(_File().compute)
