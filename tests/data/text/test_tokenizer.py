"""Tokenizers: what is encoded comes back, from the file that keeps one too."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.text.text_format import TextFormat
from pipeline.data.text.tokenizer import (
    UNKNOWN,
    ByteTokenizer,
    CharacterTokenizer,
    WordTokenizer,
    make_character_tokenizer,
    make_word_tokenizer,
)
from pipeline.data.text.tokenizer_file import parse_tokenizer
from tests.data.text.made_up import WORDS, tokenizer_json

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.mark.medium
@given(TEXTS)
def test_byte_tokens_are_utf8(text: str) -> None:
    tokens = ByteTokenizer().encode(text)
    assert tokens.tolist() == list(text.encode())
    assert ByteTokenizer().decode(tokens) == text


@pytest.mark.medium
@given(TEXTS.filter(bool), TEXTS)
def test_vocabulary_characters_round_trip_and_new_characters_are_unknown(
    known: str, text: str
) -> None:
    tokenizer = make_character_tokenizer([known])
    assert tokenizer.decode(tokenizer.encode(known)) == known
    expected = [tokenizer.names.index(c) if c in known else UNKNOWN for c in text]
    assert tokenizer.encode(text).tolist() == expected


def test_all_characters_are_unknown_to_a_tokenizer_of_empty_texts() -> None:
    assert make_character_tokenizer(["", ""]).encode("ab").tolist() == [UNKNOWN, UNKNOWN]


def test_vocabulary_has_frequent_words_in_lower_case() -> None:
    tokenizer = make_word_tokenizer(["The cat, the dog.", "A cat!"], 3)
    assert tokenizer.words == ("cat", "the", "!")
    assert tokenizer.encode("The CAT sat!").tolist() == [1, 0, UNKNOWN, 2]


@given(st.binary(max_size=80))
def test_byte_tokenizer_accepts_any_bytes(content: bytes) -> None:
    assert bytes(ByteTokenizer().encode_file(content).astype(np.uint8)) == content


def test_character_tokenizer_requires_utf8() -> None:
    with pytest.raises(ValueError, match="is not UTF-8: byte 0xff at 3"):
        CharacterTokenizer("abc").encode_file(b"abc\xff")


@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), CharacterTokenizer("\n aé\U0001f600"), WordTokenizer(("a", "the", "ü"))],
    ids=lambda tokenizer: tokenizer.kind,
)
def test_tokenizer_round_trips(tokenizer: ByteTokenizer) -> None:
    assert parse_tokenizer(tokenizer.to_bytes()) == tokenizer


def test_byte_token_names_are_distinct() -> None:
    assert len(set(ByteTokenizer().names)) == 256


def test_library_tokenizer_file_is_read() -> None:
    content = tokenizer_json()
    plain, special = (parse_tokenizer(content, special_tokens=flag) for flag in (False, True))
    assert plain.encode("The cat flew.").tolist() == [4, 5, 3, 9]
    assert special.encode("The cat flew.").tolist() == [1, 4, 5, 3, 9, 2]
    assert plain.names == tuple(WORDS)
    assert plain.decode([4, 5]) == "the cat"
    assert plain.to_bytes() == content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "isn't a tokenizer.json: Expecting value"),
        (b"\x80", "is not UTF-8: byte 0x80 at 0"),
        (b"[1, 2]", "it has no model"),
        (b'{"kind": "characters", "characters": ""}', "it has no model"),
        (b'{"kind": "words", "words": [1]}', "it has no model"),
        (b'{"model": 3}', "isn't a tokenizer.json: "),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_invalid_tokenizer_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_tokenizer(content)


def test_excessive_vocabulary_is_refused() -> None:
    model = {"type": "WordLevel", "vocab": {"a": 2_000_000_000}, "unk_token": "a"}
    content = tokenizer_json(model=model, added_tokens=[], post_processor=None)
    with pytest.raises(ValueError, match="has tokens up to number 2,000,000,000; must have 1 to"):
        parse_tokenizer(content)


@pytest.mark.medium
def test_library_panic_is_raised_as_value_error() -> None:
    """Numbers of special tokens that the library reads, and then has no vocabulary for."""
    draw, content = random.Random(1), tokenizer_json()
    values = [match.span() for match in re.finditer(rb'"[^"]*"|\d+|null', content)]
    read = refused = 0
    for _ in range(60):
        changed = bytearray(content)
        start, end = draw.choice(values)
        changed[start:end] = draw.choice([b"9999999999", b"-1", b"null", b"[]", b'"x"', b"7"])
        try:
            text = TextFormat(parse_tokenizer(bytes(changed), special_tokens=True), "class")
            text.encode("the cat", 5)
            read += 1
        except ValueError:
            refused += 1
    assert read > 0
    assert refused > 0
