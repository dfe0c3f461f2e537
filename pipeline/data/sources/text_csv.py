"""Texts of a file as padded tokens: with classes, in pairs, or as documents that share windows of
tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import count_noun, show
from pipeline.core.host.memory import require_room
from pipeline.core.registry import Location, Seq, component
from pipeline.data.columns import RawData, SampleUnit, Split, Targets
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import Share
from pipeline.data.inputs import DOCUMENT
from pipeline.data.json_lines import JSON_LINES, get_content_suffix
from pipeline.data.padding.buckets import make_ragged_array
from pipeline.data.table import Encoding
from pipeline.data.tables.raw_table import sort_class_names
from pipeline.data.text.packing import PackedWindows, pack_documents
from pipeline.data.text.text_columns import make_locate, read_text_columns
from pipeline.data.text.text_format import (
    PAIR,
    TextFormat,
    decode_text,
    list_text_files,
    make_tokenizer,
    read_files,
)
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.data.text.windows import to_narrow_dtype

SHIPPED = Path(__file__).with_name("python_docstrings.csv")
MAX_CLASSES = 10_000
SHIPPED_PAIRS = Path(__file__).with_name("python_functions.csv")


@component("dataset")
class TextCsv(DatasetSpec):
    """Texts, each with a class, for a network that classifies tokens, such as `bert`.

    A text is truncated to the longest of `buckets`, and padded to the smallest bucket that holds
    it. Of each class the same share is evaluated, evenly spread over the file.
    """

    content: ClassVar[str] = "tokens"
    name: Literal["text_csv"] = "text_csv"
    root: Location | None
    """A CSV file with names of columns in the first line, or a .jsonl file with an object
    on each line; null: 2,019 first paragraphs of docstrings of Python's library, shipped
    with this package."""
    text_column: str
    class_column: str
    encoding: Encoding = "utf-8"
    """The encoding of the file, such as latin-1 or utf-16."""
    tokenizer: str
    """words, characters, bytes, or the path of a tokenizer.json of the library `tokenizers`."""
    max_words: PositiveInt
    """The size of the vocabulary of words, which are the most frequent of the training split."""
    eval_fraction: Share
    """The share of the rows of each class that is evaluated."""

    @model_validator(mode="after")
    def _require_token_buckets(self) -> TextCsv:
        if self.buckets is None or any(len(bucket) != 1 for bucket in self.buckets):
            raise ValueError(
                "buckets: must be lengths that texts are padded to, as in [[32], [64]]"
            )
        return self

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text, which is the length of the longest bucket."""
        return max(bucket[0] for bucket in self.buckets or ())

    def read(self, cache: Path) -> RawData:
        """Return a ragged column of texts, int32 (tokens,) each, and classes, int32 (n,)."""
        file = self.root or SHIPPED
        rows = read_text_columns(file, (self.text_column, self.class_column), self.encoding)
        texts = [text for text, _ in rows]
        names = [name.strip() for _, name in rows]
        with name_file(file):
            require_room(8 * len(rows) * self.max_tokens, f"{len(rows):,} texts")
            classes = name_classes(names, make_locate(file, np.arange(len(rows)), self.encoding))
            is_eval = mark_eval_rows(names, self.eval_fraction)
        numbers = {name: number for number, name in enumerate(classes)}
        labels = np.array([numbers[name] for name in names], np.int32)
        train_rows = np.flatnonzero(~is_eval)
        train_texts = [texts[row] for row in train_rows]
        tokenizer = make_tokenizer(
            self.tokenizer, train_texts, max_words=self.max_words, special_tokens=True
        )
        text = TextFormat(tokenizer, "class", encoding=self.encoding)
        splits = []
        for split_rows in (train_rows, np.flatnonzero(is_eval)):
            with name_file(file):
                encoded = [text.encode(texts[row], self.max_tokens) for row in split_rows]
                sizes = np.array([[len(tokens)] for tokens in encoded], np.int32)
                tokens = make_ragged_array(np.concatenate(encoded), sizes, ())
            locate = make_locate(file, split_rows, self.encoding)
            splits.append(Split({"tokens": tokens, "label": labels[split_rows]}, locate=locate))
        train, evaluated = splits
        unit = SampleUnit("texts", "texts", size=f"of at most {self.max_tokens} tokens")
        return RawData(train, evaluated, Targets(classes), unit=unit, text=text, inputs=("tokens",))


def name_classes(names: Sequence[str], locate: Callable[[int], str]) -> tuple[str, ...]:
    """Return the names of the classes in their order. Raises DataError with the place of a row
    without a class, and ValueError for a single class or too many."""
    if "" in names:
        raise DataError(f"{locate(names.index(''))} has no class; every text needs one")
    counts = Counter(names)
    if len(counts) < 2:
        raise ValueError(
            f"all rows have class {show_name(names[0])}; must have at least two classes"
        )
    if len(counts) > min(MAX_CLASSES, len(names) // 2):
        raise ValueError(
            f"{len(names):,} rows have {len(counts):,} classes; must be at most {MAX_CLASSES:,}, "
            "with two rows each on average"
        )
    return sort_class_names(counts)


def mark_eval_rows(names: Sequence[str], share: float) -> np.ndarray:
    """Return whether each row is evaluated, bool (rows,). `names` are their classes.

    Of each class, evenly spread, `share` is evaluated, rounded down, but at least the last of two
    or more rows. Raises ValueError for an empty split.
    """
    rows_by_class: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows_by_class.setdefault(name, []).append(row)
    is_eval = np.zeros(len(names), bool)
    for rows in rows_by_class.values():
        # The product of 0.29 and 100 is below 29.
        counts = np.floor(np.arange(len(rows) + 1) * share + 1e-9)
        is_eval[rows] = np.diff(counts) > 0
        if len(rows) > 1 and not counts[-1]:
            is_eval[rows[-1]] = True
    if not is_eval.any() or is_eval.all():
        raise ValueError(
            f"dataset.eval_fraction = {share} of {len(names):,} rows leaves a split empty; use "
            "more rows, or another share"
        )
    return is_eval


@component("dataset")
class TextPairs(DatasetSpec):
    """Pairs of texts, for a network of two inputs, `text_a` and `text_b`.

    With a column of classes, a network classifies the pairs. Without one, it finds the text that
    belongs to a text: the label of a pair is its number in the split. Texts are truncated, and
    padded with zeros, which the masks `text_a_mask` and `text_b_mask` tell from tokens. Of each
    class, or of all pairs, the same share is evaluated, evenly spread over the file.
    """

    content: ClassVar[str] = "tokens"
    name: Literal["text_pairs"] = "text_pairs"
    root: Location | None
    """A CSV file with names of columns in the first line, or a .jsonl file with an object
    on each line; null: functions of Python's library, each with the first paragraph of its
    docstring, shipped with this package."""
    text_columns: Annotated[Seq[str], Field(min_length=2, max_length=2)]
    """The columns of `text_a` and `text_b`."""
    class_column: str | None
    """null: pairs have no classes."""
    encoding: Encoding = "utf-8"
    """The encoding of the file, such as latin-1 or utf-16."""
    tokenizer: str
    """words, characters, bytes, or the path of a tokenizer.json of the library `tokenizers`."""
    max_words: PositiveInt
    """The size of the vocabulary of words, which are the most frequent of the training split in
    both columns."""
    lengths: Annotated[Seq[PositiveInt], Field(min_length=2, max_length=2)]
    """Tokens of `text_a` and of `text_b`."""
    eval_fraction: Share
    """The share of the rows, of each class if there are classes, that is evaluated."""

    @model_validator(mode="after")
    def _require_different_columns(self) -> TextPairs:
        if len(set(self.text_columns)) < 2:
            raise ValueError(
                f"text_columns = {list(self.text_columns)}: must be two different columns"
            )
        if self.buckets is not None:
            raise ValueError("buckets: must be null; lengths has the tokens of both texts")
        return self

    def read(self, cache: Path) -> RawData:
        """Return the columns of `PAIR`, int32 (tokens,) and bool (tokens,), and labels, int32
        (n,)."""
        file = self.root or SHIPPED_PAIRS
        class_columns = () if self.class_column is None else (self.class_column,)
        rows = read_text_columns(file, (*self.text_columns, *class_columns), self.encoding)
        locate_row = make_locate(file, np.arange(len(rows)), self.encoding)
        with name_file(file):
            require_room(5 * len(rows) * sum(self.lengths), f"{len(rows):,} pairs of texts")
            _refuse_empty_texts(rows, self.text_columns, locate_row)
            labels, classes = self._read_classes(rows, locate_row)
            is_eval = mark_eval_rows(
                [classes[n] if classes else "" for n in labels], self.eval_fraction
            )
            train_rows, eval_rows = np.flatnonzero(~is_eval), np.flatnonzero(is_eval)
            train_texts = [text for row in train_rows for text in rows[row][:2]]
            tokenizer = make_tokenizer(
                self.tokenizer, train_texts, max_words=self.max_words, special_tokens=True
            )
            text = TextFormat(tokenizer, "pair", self.text_columns, self.encoding)
            splits = []
            for split_rows in (train_rows, eval_rows):
                pairs = [rows[row][:2] for row in split_rows]
                numbers = labels[split_rows] if classes else np.arange(len(pairs), dtype=np.int32)
                columns = {**text.encode_pairs(pairs, self.lengths), "label": numbers}
                locate = make_locate(file, split_rows, self.encoding)
                splits.append(Split(columns, locate=locate))
        train, evaluated = splits
        targets = Targets(classes) if classes else Targets((), "matching")
        size = f"of at most {self.lengths[0]} and {self.lengths[1]} tokens"
        unit = SampleUnit("pairs", "pairs", size=size)
        return RawData(train, evaluated, targets, unit=unit, text=text, inputs=PAIR)

    def _read_classes(
        self, rows: Sequence[Sequence[str]], locate: Callable[[int], str]
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the class of each row, int32 (rows,), and the names of the classes; zeros and ()
        without a column of classes."""
        if self.class_column is None:
            return np.zeros(len(rows), np.int32), ()
        names = [row[2].strip() for row in rows]
        classes = name_classes(names, locate)
        numbers = {name: number for number, name in enumerate(classes)}
        return np.array([numbers[name] for name in names], np.int32), classes


def _refuse_empty_texts(
    rows: Sequence[Sequence[str]], columns: Sequence[str], locate: Callable[[int], str]
) -> None:
    """Raise DataError with the place of the first row whose text has no visible character."""
    for number, row in enumerate(rows):
        for column, text in zip(columns, row, strict=False):
            if not text.strip():
                raise DataError(
                    f"{locate(number)} has an empty text in column {show_name(column)}; every "
                    "pair needs two texts"
                )


TABLES = (".csv", *JSON_LINES)
"""Suffixes of files that are tables, also before .gz and .zip."""
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
    encoding: Encoding = "utf-8"
    """The encoding of the files, such as latin-1 or utf-16."""
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
        with name_file(source):
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
            text=TextFormat(tokenizer, "next_token", encoding=self.encoding),
            inputs=("tokens", DOCUMENT),
            notes=(_describe_packing(train, self.length),),
        )

    def _read_texts(self, source: Path) -> list[str]:
        if source.is_file() and get_content_suffix(source) in TABLES:
            return [
                text for (text,) in read_text_columns(source, (self.text_column,), self.encoding)
            ]
        files = list_text_files(source, self.pattern)
        if len(files) == 1:
            raise DataError(
                f"{files[0]}: is the only document; must be several, or dataset=text for one text"
            )
        texts = []
        for file, content in zip(files, read_files(files), strict=True):
            with name_file(file):
                texts.append(decode_text(content, self.encoding).removeprefix("\ufeff"))
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
