"""The source `text_csv`: columns, classes, the split of each class, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.padding.buckets import RaggedArray
from pipeline.data.sources.text_csv import TextCsv, mark_eval_rows
from tests.data.section import section
from tests.data.text.made_up import tokenizer_json

DEFAULTS = {
    "text_column": "text",
    "class_column": "class",
    "tokenizer": "words",
    "max_words": 100,
    "eval_fraction": 0.25,
    "buckets": ((4,), (8,)),
    "padding_mask": True,
}
ROWS = "text,class\n" + "".join(f'"the {n}, said",{"ab"[n % 2]}\n' for n in range(16))


def source(root: Path | None, **fields: Any) -> TextCsv:
    return TextCsv(**section(root=root, **{**DEFAULTS, **fields}))


def read(file: Path, content: str | bytes = ROWS, **fields: Any) -> RawData:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return source(file, **fields).read(Path())


def tokens(raw: RawData, row: int) -> list[int]:
    column = raw.train.columns["tokens"]
    assert isinstance(column, RaggedArray)
    return column.value(row).ravel().tolist()


def test_split_is_stratified_by_class(tmp_path: Path) -> None:
    raw = read(tmp_path / "a.csv")
    assert raw.classes == ("a", "b")
    assert Counter(np.asarray(raw.eval.columns["label"]).tolist()) == {0: 2, 1: 2}
    assert len(raw.train) == 12


def test_classes_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    """As `loss=ordinal` needs them."""
    rows = "text,class\n" + "".join(f"the {n},{(10, -1, 2)[n % 3]}\n" for n in range(12))
    raw = read(tmp_path / "a.csv", rows)
    assert raw.classes == ("-1", "2", "10")
    assert np.asarray(raw.train.columns["label"])[:3].tolist() == [2, 0, 1]
    assert read(tmp_path / "a.csv", rows.replace(",2\n", ",b\n")).classes == ("-1", "10", "b")


def test_vocabulary_is_built_from_the_training_split(tmp_path: Path) -> None:
    raw = read(tmp_path / "a.csv")
    assert raw.text is not None
    words = raw.text.tokenizer.names
    assert words[:3] == (",", "said", "the")
    assert "6" not in words
    assert tokens(raw, 0) == [2, 5, 3 + words.index("0"), 3, 4]


def test_shipped_rows_are_read() -> None:
    raw = source(None, max_words=4000, eval_fraction=0.2, buckets=((32,),)).read(Path())
    assert (len(raw.train), len(raw.eval), len(raw.classes)) == (1617, 402, 10)


def test_columns_and_tokenizer_can_be_set(tmp_path: Path) -> None:
    content = ROWS.replace("text,class", "said,who")
    names = {"text_column": "said", "class_column": "who"}
    raw = read(tmp_path / "a.csv", content, **names, tokenizer="bytes")
    assert tokens(raw, 0) == [2, *(3 + byte for byte in b"the 0, ")]
    (tmp_path / "t.json").write_bytes(tokenizer_json())
    raw = read(tmp_path / "a.csv", content, **names, tokenizer=str(tmp_path / "t.json"))
    assert tokens(raw, 0) == [1, 4, 3, 3, 3, 2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no column text, class; it has nothing"),
        ("words,class\n", "has no column text; it has words, class"),
        ("text,class\n", "has no rows"),
        ("text,class\na,x\nb\n", "line 3 doesn't have 2 fields"),
        ("text,class\na,x\nbuy now, please,y\n", "line 3 doesn't have 2 fields; a field with"),
        ("text,class\na,x\nb,x\n", "all rows have class x; must have at least two classes"),
        ('text,class\n"a\nb",x\nb, \n', r"a\.csv, line 4 has no class; every text needs one"),
        ("text,class,class\na,x,y\n", "has the column class more than once"),
        ("text,class\na,x\nb, x \n", "all rows have class x"),
        ("text,class\na,x\nb,y\n", "2 rows have 2 classes"),
        (b"text,class\n\xffa,x\n", "is not UTF-8: byte 0xff at 11"),
        (b"text,class\na\0,x\n", "isn't a CSV: it holds zero bytes"),
        ('text,class\n"a,x\n', "unexpected end of data"),
    ],
)
def test_invalid_file_is_refused(content: str | bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        read(tmp_path / "a.csv", content)


def test_byte_order_mark_is_not_part_of_a_name(tmp_path: Path) -> None:
    assert read(tmp_path / "a.csv", "\ufeff" + ROWS).classes == ("a", "b")


def test_buckets_must_be_lengths() -> None:
    for buckets in (None, ((4, 4),)):
        with pytest.raises(ValidationError, match="must be lengths that texts are padded to"):
            source(None, buckets=buckets, padding_mask=False)


def test_every_class_with_two_rows_is_evaluated() -> None:
    """A share is rounded down otherwise, and the product of 0.29 and 100 is below 29."""
    names = ["often"] * 11 + ["rare", "once", "rare"]
    assert mark_eval_rows(names, 0.25).nonzero()[0].tolist() == [3, 7, 13]
    assert mark_eval_rows(["often"] * 100, 0.29).sum() == 29
