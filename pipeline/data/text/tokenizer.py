"""Tokenizers, which convert texts to tokens, integers, and back."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from pipeline.core.files.atomic_write import format_json

UNKNOWN = -1
"""The token of a character or word that the vocabulary lacks."""
_WORDS = re.compile(r"\w+|[^\w\s]")


class Tokenizer(ABC):
    """Base of the tokenizers. Tokens are integers from 0 to `vocabulary` - 1."""

    kind: str
    """The kind of tokens, for messages and tokenizer.json."""
    has_special_tokens: ClassVar[bool] = False
    """Whether tokens such as [CLS] are the tokenizer's own."""

    @property
    def vocabulary(self) -> int:
        """The number of different tokens."""
        return len(self.names)

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The name of each token, all different."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, int32 (n,), with `UNKNOWN` for what the vocabulary lacks."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the content of a tokenizer.json, which `parse_tokenizer` reads."""

    def encode_file(self, content: bytes) -> np.ndarray:
        """Return the tokens of a file, int32 (n,). Raises ValueError if it isn't UTF-8."""
        return self.encode(decode_utf8(content))


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """A token for each byte of a text in UTF-8. A file may have any bytes."""

    kind = "bytes"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Printable ASCII characters, and hexadecimal numbers such as 0x0a for other bytes."""
        return tuple(chr(n) if 33 <= n < 127 else f"0x{n:02x}" for n in range(256))

    def encode(self, text: str) -> np.ndarray:
        """Return one token per byte. No byte is unknown."""
        return self.encode_file(text.encode("utf-8", "surrogateescape"))

    def encode_file(self, content: bytes) -> np.ndarray:
        """Return one token per byte, for any content."""
        return np.frombuffer(content, np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text, with replacement characters for bytes that aren't UTF-8."""
        return bytes(map(int, tokens)).decode("utf-8", "replace")

    def to_bytes(self) -> bytes:
        return _to_json({"kind": self.kind})


@dataclass(frozen=True)
class CharacterTokenizer(Tokenizer):
    """A token for each character of a text. `characters` is the sorted vocabulary."""

    characters: str
    kind = "characters"

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.characters)

    @cached_property
    def _codes(self) -> np.ndarray:
        return _to_code_points(self.characters)

    def encode(self, text: str) -> np.ndarray:
        codes = _to_code_points(text)
        if not self.characters:  # of training texts that are all empty
            return np.full(len(codes), UNKNOWN, np.int32)
        positions = np.searchsorted(self._codes, codes).clip(max=len(self._codes) - 1)
        return np.where(self._codes[positions] == codes, positions, UNKNOWN).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.characters[token] for token in tokens)

    def to_bytes(self) -> bytes:
        return _to_json({"kind": self.kind, "characters": self.characters})


@dataclass(frozen=True)
class WordTokenizer(Tokenizer):
    """A token for each word, in lower case, and for each other character except white space."""

    words: tuple[str, ...]
    kind = "words"

    @property
    def names(self) -> tuple[str, ...]:
        return self.words

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, text: str) -> np.ndarray:
        return np.array([self._numbers.get(word, UNKNOWN) for word in split_words(text)], np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return " ".join(self.words[token] for token in tokens)

    def to_bytes(self) -> bytes:
        return _to_json({"kind": self.kind, "words": list(self.words)})


def make_character_tokenizer(texts: Iterable[str]) -> CharacterTokenizer:
    """Make a tokenizer of all characters in the texts."""
    return CharacterTokenizer("".join(sorted(set(chain.from_iterable(texts)))))


def make_word_tokenizer(texts: Iterable[str], max_words: int) -> WordTokenizer:
    """Make a tokenizer of the `max_words` most frequent words, which precede less frequent ones."""
    counts = Counter(word for text in texts for word in split_words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return WordTokenizer(tuple(ranked[:max_words]))


def split_words(text: str) -> Sequence[str]:
    """Return the words of a text in lower case, and its punctuation."""
    return _WORDS.findall(text.lower())


def decode_utf8(content: bytes) -> str:
    """Decode UTF-8. Raises ValueError with the first invalid byte."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8: byte 0x{content[error.start]:02x} at {error.start:,}"
        ) from error


def _to_code_points(text: str) -> np.ndarray:
    """Return the code points of the characters, uint32 (n,)."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _to_json(tree: Any) -> bytes:
    return (format_json(tree) + "\n").encode()
