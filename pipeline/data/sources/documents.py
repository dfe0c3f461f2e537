"""Documents that share windows of tokens. The label of each token is the token after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from pipeline.core.errors import DataError
from pipeline.core.files.value_text import count_noun, show
from pipeline.core.host.memory import require_room
from pipeline.core.registry import Location, component
from pipeline.data.columns import RawData, SampleUnit, Split
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import Share
from pipeline.data.inputs import DOCUMENT
from pipeline.data.sources.text_csv import SHIPPED_PAIRS, mark_eval_rows
from pipeline.data.targets import Targets
from pipeline.data.text.packing import PackedWindows, pack_documents
from pipeline.data.text.text_columns import JSON_LINES, read_text_columns
from pipeline.data.text.text_format import TextFormat, list_text_files, make_tokenizer, read_files
from pipeline.data.text.tokenizer import Tokenizer, decode_utf8
from pipeline.data.text.windows import to_narrow_dtype

TABLES = (".csv", *JSON_LINES)
BYTES_PER_TOKEN = 24
"""Bytes of memory for each token, in Python, windows, labels and numbers of documents."""


@component("dataset")
class Documents(DatasetSpec):
    """Documents, packed into windows of tokens: several short ones share a window.

    A network of layers keeps them apart: a token attends only to its own document, in which
    positions begin at 0. The same share of the documents is evaluated, evenly spread.
    """

    content: ClassVar[str] = "tokens"
    name: Literal["documents"] = "documents"
    root: Location | None
    """A folder, of which each file that matches `pattern` is a document, or a CSV or .jsonl file,
    of which each row is one; null: docstrings of Python's library, shipped with this package."""
    pattern: str
    """Pattern of the files in a folder, such as **/*.txt."""
    text_column: str
    """Column of the documents in a CSV or .jsonl file."""
    end: str
    """Text at the end of each document, by which the network learns to end."""
    tokenizer: str
    """bytes, characters, or the path of a tokenizer.json of the library `tokenizers`."""
    length: Annotated[int, Field(ge=2)]
    """Number of tokens in a window. A longer document is cut into pieces."""
    eval_fraction: Share
    """The share of the documents that is evaluated."""

    @model_validator(mode="after")
    def _check_labels(self) -> Documents:
        if self.buckets is not None:
            buckets = show(list(self.buckets))
            raise ValueError(f"buckets = {buckets}: must be null; all windows have one length")
        if self.ignore_index is None or self.ignore_index >= 0:
            raise ValueError(
                f"ignore_index = {show(self.ignore_index)}: must be below 0, the label of padding"
            )
        return self

    def read(self, cache: Path) -> RawData:
        """Return windows of tokens with their documents and labels, (n, length) each."""
        source = self.root or SHIPPED_PAIRS
        texts = self._read_texts(source)
        require_room(BYTES_PER_TOKEN * sum(map(len, texts)), f"{len(texts):,} documents")
        tokenizer = make_tokenizer(self.tokenizer, (text + self.end for text in texts))
        with name_file(source):
            is_eval = mark_eval_rows([""] * len(texts), self.eval_fraction)
        train, evaluated = (
            self._pack(source, tokenizer, [texts[row] for row in np.flatnonzero(is_in_split)])
            for is_in_split in (~is_eval, is_eval)
        )
        return RawData(
            train=Split(train.columns),
            eval=Split(evaluated.columns),
            targets=Targets(tokenizer.names, "next_token"),
            unit=SampleUnit("windows", "tokens", self.length, f"of {self.length} tokens"),
            text=TextFormat(tokenizer, "next_token"),
            inputs=("tokens", DOCUMENT),
            notes=(_describe_packing(train, self.length),),
        )

    def _read_texts(self, source: Path) -> list[str]:
        if source.is_file() and source.suffix.lower() in TABLES:
            return [text for (text,) in read_text_columns(source, (self.text_column,))]
        files = list_text_files(source, self.pattern)
        if len(files) == 1:
            raise DataError(
                f"{files[0]}: is the only document; must be several, or dataset=text for one text"
            )
        texts = []
        for file, content in zip(files, read_files(files), strict=True):
            with name_file(file):
                texts.append(decode_utf8(content))
        return texts

    def _pack(self, source: Path, tokenizer: Tokenizer, texts: Sequence[str]) -> PackedWindows:
        assert self.ignore_index is not None, "the recipe was checked"
        with name_file(source):
            documents = [
                to_narrow_dtype(tokenizer.encode(text + self.end), tokenizer.vocabulary)
                for text in texts
            ]
            return pack_documents(documents, self.length, self.ignore_index)


def _describe_packing(packed: PackedWindows, length: int) -> str:
    windows = len(packed.columns[DOCUMENT])
    cut = packed.pieces - packed.documents
    longer = f", longer ones in {count_noun(cut, 'more piece')}" if cut else ""
    return (
        f"{packed.documents:,} training documents{longer} share {windows:,} windows of {length} "
        f"tokens: {packed.padding:.1%} is padding, one in each window {packed.padding_alone:.1%}"
    )
