"""Text files as windows of tokens. The label of each token is the token after it."""

from __future__ import annotations

import codecs
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal

import numpy as np
from pydantic import PositiveInt, field_validator, model_validator

from pipeline.core.errors import DataError
from pipeline.core.files.value_text import show
from pipeline.core.registry import Location, component
from pipeline.data.columns import RawData, SampleUnit, Split, Targets
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import Share
from pipeline.data.table import Encoding
from pipeline.data.text.text_format import (
    TextFormat,
    decode_text,
    list_text_files,
    make_tokenizer,
    read_files,
)
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.data.text.windows import make_window_columns, to_narrow_dtype

SHIPPED = Path(__file__).with_name("python_reference.txt")


@component("dataset")
class Text(DatasetSpec):
    """The text of a file, or of all files of a folder that match a pattern, as windows of tokens.

    Files are joined in the order of their paths. The end of the joined text is the evaluation
    split, with windows that don't overlap. A last window that isn't full is left out.
    """

    content: ClassVar[str] = "tokens"
    name: Literal["text"] = "text"
    root: Location | None
    """A file or a folder; null: 128 KiB of the Python reference, shipped with this package."""
    pattern: str
    """Pattern of the files in a folder, such as **/*.txt."""
    text_column: str | None = None
    """The column of CSV files, or the field of the objects of .jsonl files, that has a text in each
    row; null: a file is one text."""
    encoding: Encoding = "utf-8"
    """The encoding of the files, such as latin-1 or utf-16."""
    separator: str
    """Text that is inserted between files, or between rows."""
    tokenizer: str
    """bytes, characters, or the path of a tokenizer.json of the library `tokenizers`."""
    length: PositiveInt
    """Number of tokens in a window."""
    stride: PositiveInt | None
    """Number of tokens between the starts of two training windows; null: `length`."""
    eval_fraction: Share
    """The share of the tokens that is evaluated, at the end of the text."""

    @field_validator("pattern")
    @classmethod
    def _require_inside(cls, pattern: str) -> str:
        path = PurePosixPath(pattern)
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{pattern}: must be a pattern inside of the folder, as in **/*.txt")
        return pattern

    @model_validator(mode="after")
    def _require_no_buckets(self) -> Text:
        if self.buckets is not None:
            raise ValueError(
                f"buckets = {show(list(self.buckets))}: must be null; all windows have one length"
            )
        return self

    def read(self, cache: Path) -> RawData:
        """Return windows of tokens, and labels, both (n, length), uint8 or int32."""
        files = [SHIPPED] if self.root is None else list_text_files(self.root, self.pattern)
        contents = self._read_texts(files)
        source = files[0] if len(files) == 1 else self.root
        if not any(contents):
            raise DataError(f"{source}: has no text, so that there is no vocabulary")
        tokenizer = make_tokenizer(
            self.tokenizer, chain([self.separator], map(bytes.decode, contents))
        )
        tokens = self._encode_files(tokenizer, files, contents)
        num_train = len(tokens) - round(len(tokens) * self.eval_fraction)

        def make_split(name: str, split_tokens: np.ndarray, stride: int) -> Split:
            try:
                return Split(make_window_columns(split_tokens, self.length, stride))
            except ValueError as error:
                raise DataError(
                    f"{source}: the {name} split has {error}; use a longer text, or a shorter "
                    "dataset.length"
                ) from error

        return RawData(
            train=make_split("training", tokens[:num_train], self.stride or self.length),
            eval=make_split("evaluation", tokens[num_train:], self.length),
            targets=Targets(tokenizer.names, "next_token"),
            unit=SampleUnit("windows", "tokens", self.length, f"of {self.length} tokens"),
            text=TextFormat(tokenizer, "next_token", encoding=self.encoding),
            inputs=("tokens",),
        )

    def _read_texts(self, files: list[Path]) -> list[bytes]:
        """Return the text of each file in UTF-8, its rows joined by the separator. Raises DataError
        for another encoding and a missing column. Tokens of bytes accept any bytes as UTF-8."""
        if self.text_column is not None:
            # Imported here, since few texts are columns.
            from pipeline.data.text.text_columns import read_text_columns

            columns = (read_text_columns(file, [self.text_column], self.encoding) for file in files)
            return [self.separator.join(text for (text,) in rows).encode() for rows in columns]
        contents = read_files(files)
        is_utf8 = codecs.lookup(self.encoding).name == "utf-8"
        if is_utf8 and self.tokenizer == "bytes":
            return contents
        texts = []
        for file, content in zip(files, contents, strict=True):
            with name_file(file):
                text = decode_text(content, self.encoding)
            texts.append(content if is_utf8 else text.removeprefix("\ufeff").encode())
        return texts

    def _encode_files(
        self, tokenizer: Tokenizer, files: list[Path], contents: list[bytes]
    ) -> np.ndarray:
        """Return the tokens of all files and of the separators between them, uint8 or int32
        (tokens,). Raises DataError for a text that can't be encoded."""
        separator = self.separator.encode()
        pieces = []
        for number, (file, content) in enumerate(zip(files, contents, strict=True), start=1):
            text = content + separator if number < len(files) else content
            with name_file(file):
                pieces.append(to_narrow_dtype(tokenizer.encode_file(text), tokenizer.vocabulary))
        return np.concatenate(pieces)
