"""Texts as a network reads them: special tokens, prompts, and the file that a run keeps.

Text files of a folder, their lines, and what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from pipeline.core.errors import DataError
from pipeline.data.text.text_format import (
    MAX_TOKENIZER_BYTES,
    TextFormat,
    list_text_files,
    read_files,
    read_text_format,
    read_text_lines,
    read_tokenizer,
    write_tokenizer,
)
from pipeline.data.text.tokenizer import ByteTokenizer, CharacterTokenizer, WordTokenizer
from pipeline.data.text.tokenizer_file import parse_tokenizer
from tests.data.text.made_up import tokenizer_json

LETTERS = CharacterTokenizer("abc")


def test_classified_text_begins_with_a_special_token() -> None:
    text = TextFormat(LETTERS, "class")
    assert text.vocabulary == 6
    assert text.encode("abz", 9).tolist() == [2, 3, 4, 1]
    assert text.encode("abcabc", 3).tolist() == [2, 3, 4]
    assert text.encode("", 3).tolist() == [2]
    assert text.encode_all(["c", ""], 3).tolist() == [[2, 5, -1], [2, -1, -1]]


def test_library_tokenizer_adds_special_tokens() -> None:
    text = TextFormat(parse_tokenizer(tokenizer_json(), special_tokens=True), "class")
    assert text.vocabulary == 10
    assert text.encode("the dog", 9).tolist() == [1, 4, 7, 2]


def test_prompt_is_encoded_unchanged() -> None:
    assert TextFormat(LETTERS, "next_token").encode_prompt("cab").tolist() == [2, 0, 1]
    assert TextFormat(ByteTokenizer(), "next_token").encode_prompt("é").tolist() == [195, 169]


def test_prompt_with_unknown_characters_is_refused() -> None:
    with pytest.raises(DataError, match="the prompt has 'x', '\\?', not among the 3 characters"):
        TextFormat(LETTERS, "next_token").encode_prompt("ax?x")
    with pytest.raises(DataError, match="the prompt is empty; must have at least one token"):
        TextFormat(LETTERS, "next_token").encode_prompt("")
    with pytest.raises(DataError, match="has no tokens; must have at least one"):
        TextFormat(parse_tokenizer(tokenizer_json()), "next_token").encode_prompt("  ")


def test_prompt_with_an_unknown_word_is_refused() -> None:
    text = TextFormat(WordTokenizer(("the", "dog")), "next_token")
    with pytest.raises(DataError, match=r"the prompt has 'zebra', not among the 2 words"):
        text.encode_prompt("the zebra")


def test_tokenizer_is_stored_with_the_run(tmp_path: Path) -> None:
    text = TextFormat(LETTERS, "next_token")
    write_tokenizer(tmp_path, text)
    assert read_text_format(tmp_path, {"text": text.to_dict()}) == text
    assert read_text_format(tmp_path, {}) is None
    with pytest.raises(ValueError, match="text is not described"):
        read_text_format(tmp_path, {"text": {"predicts": "tomorrow"}})
    with pytest.raises(ValueError, match="text is not described"):
        read_text_format(tmp_path, {"text": "class"})


def test_invalid_or_huge_tokenizer_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match="can't be read as a tokenizer: No such file"):
        read_tokenizer(file)
    with pytest.raises(DataError, match="isn't a regular file"):
        read_tokenizer(tmp_path)
    with file.open("wb") as sparse:
        sparse.truncate(MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(DataError, match="has more than 67,108,864 bytes"):
        read_tokenizer(file)
    file.write_text("{}")
    with pytest.raises(DataError, match=r"isn't a tokenizer\.json: it has no model"):
        read_tokenizer(file)


def test_format_of_pairs_has_the_columns_of_the_csv(tmp_path: Path) -> None:
    text = TextFormat(LETTERS, "pair", ("ask", "answer"))
    write_tokenizer(tmp_path, text)
    assert read_text_format(tmp_path, {"text": text.to_dict()}) == text
    assert text.vocabulary == 6
    columns = text.encode_pairs([("ab", "c"), ("", "abcab")], (3, 4))
    assert {name: array.tolist() for name, array in columns.items()} == {
        "text_a": [[2, 3, 4], [2, 0, 0]],
        "text_a_mask": [[True] * 3, [True, False, False]],
        "text_b": [[2, 5, 0, 0], [2, 3, 4, 5]],
        "text_b_mask": [[True, True, False, False], [True] * 4],
    }


@pytest.mark.parametrize("predicts", ["class", "pair"])
def test_format_keeps_the_encoding_of_files(
    tmp_path: Path, predicts: Literal["class", "pair"]
) -> None:
    columns = ("ask", "answer") if predicts == "pair" else ()
    text = TextFormat(LETTERS, predicts, columns, "utf-16")
    write_tokenizer(tmp_path, text)
    assert read_text_format(tmp_path, {"text": text.to_dict()}) == text
    lines = write(tmp_path / "a.txt", "é\nb".encode("utf-16"))
    assert read_text_lines(lines, text.encoding) == ["é", "b"]
    with pytest.raises(ValueError, match="'x': must be an encoding of texts"):
        read_text_format(tmp_path, {"text": {**text.to_dict(), "encoding": "x"}})


@pytest.mark.parametrize("columns", [["ask"], ["ask", 1], None])
def test_format_of_pairs_without_two_columns_is_refused(tmp_path: Path, columns: object) -> None:
    with pytest.raises(ValueError, match="text is not described as a run describes it"):
        read_text_format(tmp_path, {"text": {"predicts": "pair", "columns": columns}})


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_matching_files_are_listed_in_order(tmp_path: Path) -> None:
    names = ("b.txt", "a.txt", "deep/c.txt", "d.csv")
    for name in names:
        write(tmp_path / name, name)
    files = list_text_files(tmp_path, "**/*.txt")
    assert [str(file.relative_to(tmp_path)) for file in files] == ["a.txt", "b.txt", "deep/c.txt"]
    assert read_files(files) == [b"a.txt", b"b.txt", b"deep/c.txt"]
    assert list_text_files(tmp_path / "d.csv", "*.txt") == [tmp_path / "d.csv"]


def test_folder_without_texts_and_outside_link_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    with pytest.raises(DataError, match="texts: there is no such file or folder"):
        list_text_files(folder, "*.txt")
    folder.mkdir()
    with pytest.raises(DataError, match=r"holds no file that matches dataset\.pattern = '?\*\.txt"):
        list_text_files(folder, "*.txt")
    (folder / "a.txt").symlink_to(write(tmp_path / "secret", "x"))
    with pytest.raises(DataError, match=r"a\.txt: leads out of"):
        list_text_files(folder, "*.txt")


@pytest.mark.parametrize("pattern", ["/abs/*.txt", "**.txt", "", "."])
def test_wrong_pattern_is_refused(pattern: str, tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "x")
    with pytest.raises(DataError, match=r"dataset\.pattern = '.*': .*must be relative"):
        list_text_files(tmp_path, pattern)


def test_empty_lines_are_left_out(tmp_path: Path) -> None:
    assert read_text_lines(write(tmp_path / "a.txt", " one \n\n\ttwo\r\n")) == ["one", "two"]
    marked = "\ufeffone\r\ntwo\x0c\u2028 more\rthree"  # a file of Windows
    assert read_text_lines(write(tmp_path / "a.txt", marked)) == [
        "one",
        "two\x0c\u2028 more",
        "three",
    ]
    with pytest.raises(DataError, match="holds no text; must have one on each line"):
        read_text_lines(write(tmp_path / "b.txt", " \n\n"))
