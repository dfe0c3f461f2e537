"""Files that a library reads in a child process: Parquet, tokenizers."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from pipeline.core.errors import DataError
from pipeline.data.sources.tabular import ParquetTable
from pipeline.data.text.text_format import read_tokenizer
from tests.data.section import section
from tests.data.text.made_up import tokenizer_json
from tests.fuzz.mutate import mutate_bytes, mutate_tree

_HOSTILE: tuple[Mapping[str, Any], ...] = (
    {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100_000}},
    {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": ""}},
    {"normalizer": {"type": "NFKC"}, "pre_tokenizer": {"type": "ByteLevel"}},
    {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
        "post_processor": None,
        "added_tokens": [],
    },
    {},
)


@cache
def _parquet(compression: str, encoding: str | None) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"x": np.arange(40.0), "kind": ["a", "b", "c", "d"] * 10, "y": np.arange(40) % 2}
    options: dict[str, Any] = {"row_group_size": 15, "compression": compression}
    if encoding is not None:
        options |= {"use_dictionary": False, "column_encoding": {"kind": encoding}}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, **options)
    return buffer.getvalue()


def read_parquet_table(rng: Random, folder: Path) -> None:
    """A Parquet file, changed."""
    compression = rng.choice(("zstd", "snappy", "gzip", "none"))
    encoding = rng.choice((None, "PLAIN", "DELTA_BYTE_ARRAY"))
    path = folder / "a.parquet"
    path.write_bytes(mutate_bytes(rng, _parquet(compression, encoding)))
    ParquetTable(**section(root=path, target="y")).read(folder)


def read_tokenizer_file(rng: Random, folder: Path) -> None:
    """A tokenizer.json, changed, and a text encoded and decoded by it."""
    content = tokenizer_json(**rng.choice(_HOSTILE))
    if rng.random() < 0.7:
        content = json.dumps(mutate_tree(rng, json.loads(content))).encode()
    else:
        content = mutate_bytes(rng, content)
    path = folder / "tokenizer.json"
    path.write_bytes(content)
    tokenizer = read_tokenizer(path, special_tokens=rng.random() < 0.5)
    try:
        tokenizer.decode(tokenizer.encode("the cat sat abab " + "a" * 40).clip(min=0))
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
