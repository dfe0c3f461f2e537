"""Pairs of texts, from two columns of a CSV, as two columns of padded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from pipeline.core.files.name_text import show_name
from pipeline.core.host.memory import require_room
from pipeline.core.registry import Location, Seq, component
from pipeline.data.columns import RawData, SampleUnit, Split
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import Share
from pipeline.data.sources.text_csv import mark_eval_rows, name_classes
from pipeline.data.targets import Targets
from pipeline.data.text.text_columns import make_locate, read_text_columns
from pipeline.data.text.text_format import PAIR, TextFormat, make_tokenizer

SHIPPED = Path(__file__).with_name("python_functions.csv")


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
    """A CSV file in UTF-8, with names of columns in the first line, or a .jsonl file with an object
    on each line; null: functions of Python's library, each with the first paragraph of its
    docstring, shipped with this package."""
    text_columns: Annotated[Seq[str], Field(min_length=2, max_length=2)]
    """The columns of `text_a` and `text_b`."""
    class_column: str | None
    """null: pairs have no classes."""
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
        file = self.root or SHIPPED
        names = (*self.text_columns, *filter(None, [self.class_column]))
        rows = read_text_columns(file, names)
        with name_file(file):
            require_room(5 * len(rows) * sum(self.lengths), f"{len(rows):,} pairs of texts")
            _refuse_empty_texts(rows, self.text_columns)
            labels, classes = self._read_classes(rows)
            is_eval = mark_eval_rows(
                [classes[n] if classes else "" for n in labels], self.eval_fraction
            )
            train_rows, eval_rows = np.flatnonzero(~is_eval), np.flatnonzero(is_eval)
            train_texts = [text for row in train_rows for text in rows[row][:2]]
            tokenizer = make_tokenizer(
                self.tokenizer, train_texts, max_words=self.max_words, special_tokens=True
            )
            text = TextFormat(tokenizer, "pair", self.text_columns)
            splits = []
            for split_rows in (train_rows, eval_rows):
                pairs = [rows[row][:2] for row in split_rows]
                numbers = labels[split_rows] if classes else np.arange(len(pairs), dtype=np.int32)
                columns = {**text.encode_pairs(pairs, self.lengths), "label": numbers}
                splits.append(Split(columns, locate=make_locate(file, split_rows)))
        train, evaluated = splits
        targets = Targets(classes) if classes else Targets((), "matching")
        size = f"of at most {self.lengths[0]} and {self.lengths[1]} tokens"
        unit = SampleUnit("pairs", "pairs", size=size)
        return RawData(train, evaluated, targets, unit=unit, text=text, inputs=PAIR)

    def _read_classes(self, rows: Sequence[Sequence[str]]) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the class of each row, int32 (rows,), and the names of the classes; zeros and ()
        without a column of classes."""
        if self.class_column is None:
            return np.zeros(len(rows), np.int32), ()
        names = [row[2].strip() for row in rows]
        classes = name_classes(names)
        numbers = {name: number for number, name in enumerate(classes)}
        return np.array([numbers[name] for name in names], np.int32), classes


def _refuse_empty_texts(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> None:
    """Raise ValueError with the first row whose text has no visible character."""
    for number, row in enumerate(rows, start=1):
        for column, text in zip(columns, row, strict=False):
            if not text.strip():
                raise ValueError(
                    f"row {number:,} has an empty text in column {show_name(column)}; every pair "
                    "needs two texts"
                )
