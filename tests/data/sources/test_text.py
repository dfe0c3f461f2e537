"""The source `text`: files in order, windows, the split at the end, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.sources.text import Text
from tests.data.section import section
from tests.data.text.made_up import tokenizer_json

DEFAULTS = {
    "pattern": "**/*.txt",
    "separator": "\n",
    "tokenizer": "bytes",
    "length": 4,
    "stride": None,
    "eval_fraction": 0.25,
}


def source(root: Path | None, **fields: Any) -> Text:
    return Text(**section(root=root, **{**DEFAULTS, **fields}))


def read(root: Path | None, **fields: Any) -> RawData:
    return source(root, **fields).read(Path())


def text_of(raw: RawData) -> str:
    """The training text, put together from windows of stride 1 and the last label."""
    assert raw.text is not None
    read_, label = raw.train.columns["tokens"][:], raw.train.columns["label"][:]
    return raw.text.tokenizer.decode([*read_[:, 0].ravel().tolist(), *label[-1].tolist()])


def test_files_are_concatenated_in_path_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in (("a.txt", "first"), ("b/x.txt", "second"), ("c.txt", "third")):
        (tmp_path / name).write_text(text)
    (tmp_path / "other.md").write_text("not this")
    raw = read(tmp_path, stride=1, length=1, eval_fraction=0.1)
    assert text_of(raw) == "first\nsecond\nthird"[:-2]
    assert "x" not in text_of(read(tmp_path, stride=1, length=1, pattern="*.txt"))


def test_evaluation_windows_at_the_end_do_not_overlap(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    raw = read(tmp_path / "a.txt", stride=1)
    assert (len(raw.train), len(raw.eval)) == (71, 6)
    assert raw.eval.columns["tokens"][:].ravel().tolist() == list(range(75, 99))
    assert raw.train.columns["label"][-1:].tolist() == [[71, 72, 73, 74]]
    assert raw.train.columns["tokens"].dtype == np.uint8


def test_description_names_the_kind(tmp_path: Path) -> None:
    raw = read(None, length=128, tokenizer="characters", eval_fraction=0.1)
    assert raw.targets.task == "next_token"
    unit = raw.unit
    assert (unit.samples, unit.speed_unit, unit.per_sample) == ("windows", "tokens", 128)
    assert str(raw.targets) == "100 different tokens"
    assert len(raw.train) == 825


def test_tokenizer_file_of_the_library_is_used(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat . " * 20)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    raw = read(tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    assert raw.train.columns["tokens"][0:1].ravel().tolist() == [4, 5, 6, 9]
    assert len(raw.targets) == 10


@pytest.mark.parametrize(
    ("content", "fields", "said"),
    [
        (b"", {}, "has no text, so that there is no vocabulary"),
        (b"abcdef", {}, "the training split has 4 tokens; a window needs 5"),
        (b"abcdefghij", {}, "the evaluation split has 2 tokens; a window needs 5: 4 and"),
        (b"abc\xff" * 9, {"tokenizer": "characters"}, "a.txt: is not UTF-8: byte 0xff at 3"),
        (b"abcd" * 9, {"tokenizer": "missing.json"}, "missing.json: can't be read as a tokenizer"),
    ],
)
def test_invalid_text_is_refused(
    content: bytes, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=said):
        read(tmp_path / "a.txt", **fields)


def test_folder_without_matching_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no file that matches dataset\.pattern"):
        read(tmp_path)
    with pytest.raises(DataError, match="there is no such file or folder"):
        read(tmp_path / "nowhere")


def test_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match="leads out of"):
        read(tmp_path / "in")


@pytest.mark.parametrize("pattern", ["/etc/*", "../*.txt", "a/../../b", ""])
def test_pattern_outside_the_folder_is_refused(pattern: str) -> None:
    with pytest.raises(ValidationError, match="must be a pattern inside of the folder"):
        source(None, pattern=pattern)


def test_buckets_are_refused_for_windows() -> None:
    with pytest.raises(ValidationError, match="must be null; all windows have one length"):
        source(None, buckets=((4,),))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
def test_files_have_another_encoding(tmp_path: Path, encoding: str, tokenizer: str) -> None:
    text = "Größe und Maß\n" * 9
    mark = "\ufeff" if encoding == "utf-16-le" else ""
    (tmp_path / "a.txt").write_bytes((mark + text).encode(encoding))
    (tmp_path / "b.txt").write_bytes(text.encode("utf-8"))
    fields = {"tokenizer": tokenizer, "length": 1, "stride": 1}
    decoded = text_of(read(tmp_path / "a.txt", encoding=encoding, **fields))
    assert decoded == text_of(read(tmp_path / "b.txt", **fields))
    assert "Maß" in decoded


def test_other_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc" * 9)
    with pytest.raises(
        DataError, match=r"a.txt: is not UTF-16-LE: byte 0x63 at 26; set dataset.enc"
    ):
        read(tmp_path, encoding="utf-16-le")
    with pytest.raises(ValidationError, match="'x': must be an encoding of texts, such as utf-8"):
        source(tmp_path, encoding="x")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"id": 1, "body": "one\\n"}\n\n{"body": "two"}\n{"body": "three"}\n'),
        ("a.csv", 'body,id\n"one\n",1\ntwo,2\nthree,3\n'),
    ],
)
def test_rows_are_joined_texts(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    fields = {"text_column": "body", "separator": "|", "length": 1, "stride": 1}
    raw = read(tmp_path / name, eval_fraction=0.2, **fields)
    assert text_of(raw) == "one\n|two|three"[:-3]
    with pytest.raises(DataError, match=f"{name}: .*has no (column )?b; it has"):
        read(tmp_path / name, text_column="b")
