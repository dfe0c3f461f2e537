"""Text files as windows of tokens. The label of a token is the next token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from pydantic import PositiveInt, field_validator, model_validator

from pipeline.core.errors import DataError
from pipeline.core.files.value_text import show
from pipeline.core.registry import Location, component
from pipeline.data.columns import RawData, SampleUnit, Split
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import Share
from pipeline.data.targets import Targets
from pipeline.data.text.text_files import list_text_files, read_files
from pipeline.data.text.text_format import TextFormat, make_tokenizer
from pipeline.data.text.tokenizer import Tokenizer, decode_utf8
from pipeline.data.text.windows import make_window_columns, to_narrow_dtype

SHIPPED = Path(__file__).with_name("python_reference.txt")


@component("dataset")
class Text(DatasetSpec):
    """The text of a file, or of all files of a folder that match a pattern, as windows of tokens.

    Files are joined in the order of paths. The end of the text is the evaluation split, whose
    windows don't overlap. An incomplete window is left out.
    """

    name: Literal["text"] = "text"
    root: Location | None
    """A file or a folder; null: 128 KiB of the Python reference, shipped with this package."""
    pattern: str
    """Pattern of the files in a folder, such as **/*.txt."""
    separator: str
    """Text that is inserted between files."""
    tokenizer: str
    """bytes, characters, or the path of a tokenizer.json of the library `tokenizers`."""
    length: PositiveInt
    """Number of tokens in a window."""
    stride: PositiveInt | None
    """Number of tokens between the starts of two training windows; null: `length`."""
    eval_fraction: Share
    """Share of the tokens, at the end of the text, for evaluation."""

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
        """Return tokens, (n, length, 1, 1), and each next token, (n, length), uint8 or int32."""
        files = [SHIPPED] if self.root is None else list_text_files(self.root, self.pattern)
        contents = read_files(files)
        source = files[0] if len(files) == 1 else self.root
        if not any(contents):
            raise DataError(f"{source}: has no text, so that there is no vocabulary")
        tokenizer = make_tokenizer(self.tokenizer, self._decode_files(files, contents))
        tokens = self._encode_files(tokenizer, files, contents)
        train_tokens = len(tokens) - round(len(tokens) * self.eval_fraction)
        splits = []
        for split, split_tokens, stride in (
            ("training", tokens[:train_tokens], self.stride or self.length),
            ("evaluation", tokens[train_tokens:], self.length),
        ):
            try:
                splits.append(Split(make_window_columns(split_tokens, self.length, stride)))
            except ValueError as error:
                raise DataError(
                    f"{source}: the {split} split has {error}; use a longer text, or a shorter "
                    "dataset.length"
                ) from error
        train, evaluated = splits
        return RawData(
            train=train,
            eval=evaluated,
            targets=Targets(tokenizer.names, "next_token"),
            unit=SampleUnit("windows", "tokens", self.length, f"of {self.length} tokens"),
            text=TextFormat(tokenizer, "next_token"),
        )

    def _decode_files(self, files: list[Path], contents: list[bytes]) -> Iterator[str]:
        """Yield the separator and the texts of files. Raises DataError if one isn't UTF-8."""
        yield self.separator
        for file, content in zip(files, contents, strict=True):
            with name_file(file):
                text = decode_utf8(content)
            yield text

    def _encode_files(
        self, tokenizer: Tokenizer, files: list[Path], contents: list[bytes]
    ) -> np.ndarray:
        """Return the tokens of all files, uint8 or int32 (tokens,)."""
        separator = self.separator.encode()
        pieces = []
        for number, (file, content) in enumerate(zip(files, contents, strict=True), start=1):
            text = content + separator if number < len(files) else content
            with name_file(file):
                pieces.append(to_narrow_dtype(tokenizer.encode_file(text), tokenizer.vocabulary))
        return np.concatenate(pieces)
