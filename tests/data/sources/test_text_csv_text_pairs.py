"""The source `text_pairs`: both columns of tokens, their masks, labels, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.sources.text_csv import SHIPPED_PAIRS, TextPairs
from pipeline.data.text.text_columns import read_text_columns
from tests.data.section import section

DEFAULTS = {
    "text_columns": ("ask", "answer"),
    "class_column": None,
    "tokenizer": "words",
    "max_words": 100,
    "lengths": (4, 6),
    "eval_fraction": 0.25,
}
ROWS = "ask,answer,kind\n" + "".join(
    f'"what, is {n}",the number {n} follows {n - 1},{"ab"[n % 2]}\n' for n in range(16)
)


def source(root: Path | None, **fields: Any) -> TextPairs:
    return TextPairs(**section(root=root, **{**DEFAULTS, **fields}))


def read(file: Path, content: str = ROWS, **fields: Any) -> RawData:
    file.write_text(content)
    return source(file, **fields).read(Path())


def test_each_text_has_its_length_and_its_mask(tmp_path: Path) -> None:
    raw = read(tmp_path / "a.csv")
    columns = {name: np.asarray(column[:]) for name, column in raw.train.columns.items()}
    shapes = {name: (array.dtype.name, array.shape[1:]) for name, array in columns.items()}
    assert shapes == {
        "text_a": ("int32", (4,)),
        "text_a_mask": ("bool", (4,)),
        "text_b": ("int32", (6,)),
        "text_b_mask": ("bool", (6,)),
        "label": ("int32", ()),
    }
    assert raw.inputs == ("text_a", "text_b")
    assert raw.text is not None
    words = {word: 3 + number for number, word in enumerate(raw.text.tokenizer.names)}
    # The first text has a token too many, the second one none to fill its length.
    assert columns["text_a"][0].tolist() == [2, words["what"], words[","], words["is"]]
    assert columns["text_a_mask"][0].tolist() == [True] * 4
    expected = [2, *(words[word] for word in ("the", "number", "0", "follows")), words["-"]]
    assert columns["text_b"][0].tolist() == expected
    padded = read(tmp_path / "b.csv", lengths=(4, 9))
    assert np.asarray(padded.train.columns["text_b"][1:2])[0, 6:].tolist() == [0, 0, 0]
    mask = np.asarray(padded.train.columns["text_b_mask"][1:2])[0]
    assert mask.tolist() == [True] * 6 + [False] * 3


def test_label_without_classes_is_the_number_of_the_pair(tmp_path: Path) -> None:
    raw = read(tmp_path / "a.csv")
    assert (raw.targets.task, raw.classes, str(raw.targets)) == ("matching", (), "pairs to match")
    assert np.asarray(raw.train.columns["label"][:]).tolist() == list(range(12))
    assert np.asarray(raw.eval.columns["label"][:]).tolist() == list(range(4))


def test_classes_are_split_evenly(tmp_path: Path) -> None:
    raw = read(tmp_path / "a.csv", class_column="kind")
    assert raw.classes == ("a", "b")
    assert Counter(np.asarray(raw.eval.columns["label"]).tolist()) == {0: 2, 1: 2}


def test_vocabulary_is_of_both_columns_of_the_training_split(tmp_path: Path) -> None:
    raw = read(tmp_path / "a.csv")
    assert raw.text is not None
    words = raw.text.tokenizer.names
    assert {"what", "follows"} <= set(words)
    assert "15" not in words


def test_column_of_classes_may_have_an_empty_name(tmp_path: Path) -> None:
    raw = read(tmp_path / "a.csv", ROWS.replace("kind", "", 1), class_column="")
    assert raw.classes == ("a", "b")
    with pytest.raises(DataError, match="has no column"):
        read(tmp_path / "a.csv", class_column="")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ask,other\na,b\n", r"a\.csv: has no column answer; it has ask, other"),
        ("ask,answer\na,b\nc\n", r"a\.csv: line 3 doesn't have 2 fields"),
        ("ask,answer\na,b\nc,d,e\n", r"a\.csv: line 3 doesn't have 2 fields"),
        ("ask,answer\na,b\nc, \n", r"a\.csv, line 3 has an empty text in column answer; every"),
        ("ask,answer\n", r"a\.csv: has no rows"),
        ("ask,answer\na,b\n", "leaves a split empty"),
    ],
)
def test_unusable_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.csv", content)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_columns": ("ask", "ask")}, "must be two different columns"),
        ({"text_columns": ("ask",)}, "at least 2"),
        ({"lengths": (4,)}, "at least 2"),
        ({"buckets": ((4,),)}, "buckets: must be null; lengths has the tokens of both texts"),
    ],
)
def test_unusable_setting_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        source(None, **fields)


def test_shipped_pairs_are_as_described() -> None:
    rows = read_text_columns(SHIPPED_PAIRS, ("function", "docstring", "package"))
    license_text = SHIPPED_PAIRS.with_name("python_license.txt").read_text()
    said = re.search(r"python_functions.csv holds ([\d,]+) functions", license_text)
    assert said is not None
    assert said[1] == f"{len(rows):,}"
    assert len({package for *_, package in rows}) == 18
    for place in (0, 1):
        assert len({row[place] for row in rows}) == len(rows)
