"""Child process of `read_parquet`, which reads with pyarrow."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.core.host.limited_child import serve

OPEN = b"o"
READ = b"r"
"""Kinds of requests."""
LENGTH = struct.Struct("<Q")
"""The number of bytes before each piece of an answer."""


class _File:
    """The opened file. A request OPEN sets the attributes."""

    path: Path
    text_columns: Sequence[str]
    """Names of the columns of texts, which are read as dictionaries."""

    def compute(self, kind: bytes, content: bytes) -> list[bytes | memoryview]:
        """Return the pieces of the answer to a request. OPEN has a path as JSON; the answer is
        {"names", "rows"} as JSON. READ has {name: whether to read numbers as texts} as JSON; the
        answer is the columns as `_encode_column` encodes them."""
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
            lines = str(error).strip().splitlines()
            reason = lines[0].strip() if lines else type(error).__name__
            raise ValueError(f"can't be read as Parquet: {reason}") from error
        pieces: list[bytes | memoryview] = []
        for name, is_text in request.items():
            pieces += _encode_column(name, table.column(name), is_text)
        return pieces

    def _open(self, path: Path) -> dict[str, Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
        text_types = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
        self.path = path
        self.text_columns = [
            field.name for field in schema if any(is_kind(field.type) for is_kind in text_types)
        ]
        return {"names": schema.names, "rows": metadata.num_rows}

    def _read(self, names: list[str]) -> Any:
        """Return a pyarrow table of some columns."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        text_columns = [name for name in names if name in self.text_columns]
        try:
            # With dictionaries, repeated texts are read once.
            with pq.ParquetFile(self.path, read_dictionary=text_columns) as file:
                return file.read(columns=names, use_threads=False)
        except (pa.ArrowException, OSError):
            # Some encodings don't support dictionaries. Other errors are raised again.
            with pq.ParquetFile(self.path) as file:
                return file.read(columns=names, use_threads=False)


def _encode_column(name: str, values: Any, is_text: bool) -> list[bytes | memoryview]:
    """Return the bytes of a column: the letter n and numbers as float64, or the letter t, codes as
    int32 and the different texts as JSON, in the order of first occurrence. The code -1 is a
    missing or empty text. Before each piece but the letter is its length, as `LENGTH`. With
    `is_text` numbers become texts. Raises ValueError for values that are neither numbers nor texts.
    """
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
        used_codes, first_rows = np.unique(codes[codes >= 0], return_index=True)
        used_codes = used_codes[np.argsort(first_rows)]
        used_texts = texts.dictionary.take(pa.array(used_codes, pa.int32())).to_pylist()
    except pa.ArrowException:
        raise ValueError(f"{show_name(name)} is {dtype}; must be numbers or texts") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{show_name(name)} has a text that is not UTF-8") from error
    # As in a CSV file, an empty text is a missing value.
    present = [number for number, text in enumerate(used_texts) if text.strip()]
    used_codes = used_codes[present]
    used_texts = [used_texts[number] for number in present]
    # The last of the new codes stays -1, for the code -1 of a missing value.
    new_codes = np.full(len(texts.dictionary) + 1, -1, np.int32)
    new_codes[used_codes] = np.arange(len(used_codes))
    return [b"t", *_add_length(new_codes[codes]), *_add_length(json.dumps(used_texts).encode())]


def _add_length(content: Any) -> list[bytes | memoryview]:
    """Return the length of an array or of bytes, as `LENGTH`, and its bytes."""
    view = memoryview(content)
    # An empty view can't be cast.
    return [LENGTH.pack(view.nbytes), view.cast("B") if view.nbytes else b""]


if __name__ == "__main__":
    serve(_File().compute)
