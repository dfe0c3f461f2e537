"""The source `documents`: files and rows in shared windows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.sources.text_csv import Documents
from tests.data.section import section

DEFAULTS = {
    "pattern": "**/*.txt",
    "text_column": "text",
    "end": "\n",
    "tokenizer": "bytes",
    "length": 16,
    "ignore_index": -100,
    "eval_fraction": 0.25,
}
TEXTS = ("one", "two and a bit", "a document that is longer than a window", "four")


def read(root: Path | None, **fields: Any) -> RawData:
    return Documents(**section(root=root, **{**DEFAULTS, **fields})).read(Path())


def list_documents(raw: RawData) -> list[str]:
    """The pieces of the training documents, sorted."""
    assert raw.text is not None
    tokens, numbers = (np.asarray(raw.train.columns[name]) for name in ("tokens", "document"))
    return sorted(
        raw.text.tokenizer.decode(row[places == number].tolist())
        for row, places in zip(tokens, numbers, strict=True)
        for number in range(1, places.max() + 1)
    )


def test_files_and_rows_are_documents(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    files, lines = read(tmp_path), read(rows)
    assert list_documents(files) == list_documents(lines)
    # The last token of a document, its end, is only a label.
    assert list_documents(files) == sorted([*TEXTS[:2], TEXTS[2][:16], TEXTS[2][16:32], " window"])
    assert files.inputs == ("tokens", "document")
    assert files.notes == (
        "3 training documents, longer ones in 2 more pieces share 4 windows of 16 tokens: 14.1% is "
        "padding, one in each window 31.2%",
    )


def test_documents_have_another_encoding(tmp_path: Path) -> None:
    for number, text in enumerate(("ü", "ß and a bit", "é")):
        (tmp_path / f"{number}.txt").write_bytes(text.encode("utf-16"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in "üßé"), "latin-1"
    )
    files = read(tmp_path, encoding="utf-16", tokenizer="characters")
    assert list_documents(files) == ["ß and a bit", "ü"]
    lines = read(rows, encoding="latin-1", tokenizer="characters")
    assert list_documents(lines) == ["ß", "ü"]
    assert lines.text is not None
    assert lines.text.encoding == "latin-1"
    with pytest.raises(DataError, match=r"0\.txt: is not UTF-8: byte 0xff at 0; set dataset"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ignore_index": None}, "ignore_index = null: must be below 0"),
        ({"ignore_index": 3}, "ignore_index = 3: must be below 0"),
        ({"buckets": [[8]]}, "buckets = .*: must be null"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        read(None, **changed)


def test_documents_larger_than_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text("text\n" + "a\n" * 100)
    monkeypatch.setattr("pipeline.data.sources.text_csv.BYTES_PER_TOKEN", 2**60)
    with pytest.raises(DataError, match=r"a\.csv: 100 documents would take .* GB of memory"):
        read(tmp_path / "a.csv")


def test_single_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alone")
    with pytest.raises(DataError, match="is the only document; must be several"):
        read(tmp_path)
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="no document of two tokens"):
        read(tmp_path)
