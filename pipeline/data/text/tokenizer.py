"""Tokenizers, which convert texts to tokens, integers, and back, and their files tokenizer.json."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from pipeline.core.files.atomic_write import format_json
from pipeline.core.host.limited_process import (
    ChildLimitError,
    ChildLimits,
    LibraryError,
    LimitedProcess,
)
from pipeline.data.text.tokenizer_child import DECODE, ENCODE, ENCODE_SPECIAL, FILE

UNKNOWN = -1
"""The token of a character or word that the vocabulary lacks."""
MAX_VOCABULARY = 1 << 20
"""Most different tokens of a tokenizer.json. The network has an output for each."""
_BASE_MEMORY_BYTES = 2**30
"""Bytes of address space for a process that hasn't read anything, and the library."""
_MEMORY_PER_BYTE = 512
"""Bytes of address space for each byte of all requests so far. 100 to 180 were measured."""
_BASE_CPU_S = 10
_BYTES_PER_CPU_S = 100_000
"""The slowest accepted speed over all requests. 550,000 to 860,000 were measured on busy cores."""
_WORDS = re.compile(r"\w+|[^\w\s]")


class Tokenizer(ABC):
    """Base of the tokenizers. Tokens are integers from 0 to `vocabulary` - 1."""

    kind: str
    """The kind of tokens, for messages and tokenizer.json."""

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


class TokenizerProcess:
    """A child process that has read a tokenizer.json. It ends when this object is deleted.

    Its memory and time are limited: an untrusted file may have replacements that grow a text
    without end, or regular expressions that take hours. Raises ValueError if the library isn't
    installed, can't read the file, or exceeds the limits.
    """

    metadata: Mapping[str, Any]
    """`vocabulary`, the tokens by name, and `dropout`, the share of randomly omitted merges."""

    def __init__(self, content: bytes) -> None:
        self._process = LimitedProcess("pipeline.data.text.tokenizer_child")
        self._total_bytes = 0
        try:
            self.metadata = json.loads(self._send(FILE, content))
        except ImportError as error:
            raise ValueError(
                f"needs the library tokenizers: pip install 'recipe-pipeline[text]' ({error})"
            ) from error
        except LibraryError as error:
            raise ValueError(f"isn't a tokenizer.json: {error}") from error

    def compute(self, kind: bytes, content: bytes, description: str) -> bytes:
        """Return the answer to a request. Raises ValueError, with a description of the content,
        if the library fails or exceeds the limits."""
        try:
            return self._send(kind, content)
        except LibraryError as error:
            raise ValueError(f"the tokenizer fails on {description}: {error}") from error
        except ChildLimitError as error:
            raise ValueError(
                f"the tokenizer {error} for {description} of {len(content):,} bytes; its "
                "replacements must grow a text less, and its expressions match faster"
            ) from error

    def _send(self, kind: bytes, content: bytes) -> bytes:
        """Return the answer to a request, with limits by the bytes of all requests so far."""
        self._total_bytes += len(content)
        limits = ChildLimits(
            _BASE_MEMORY_BYTES + _MEMORY_PER_BYTE * self._total_bytes,
            _BASE_CPU_S + self._total_bytes // _BYTES_PER_CPU_S,
        )
        return self._process.ask(kind, content, limits)


@dataclass(frozen=True)
class LibraryTokenizer(Tokenizer):
    """A tokenizer.json of the library `tokenizers`, which runs in a child process.

    Raises ValueError if the library isn't installed, can't read the file or a text, or exceeds the
    limits of memory or time.
    """

    content: bytes
    special_tokens: bool = False
    """Whether texts get the file's special tokens, such as [CLS] and [SEP]."""
    kind = "tokenizer.json"

    @cached_property
    def _process(self) -> TokenizerProcess:
        return TokenizerProcess(self.content)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the tokens in the file; "unused n" for a number n that has none. Raises
        ValueError for numbers beyond `MAX_VOCABULARY`, and for a number with two names, since the
        library's choice between them varies."""
        numbers: Mapping[str, int] = self._process.metadata["vocabulary"]
        count = 1 + max(numbers.values(), default=-1)
        if not 0 < count <= MAX_VOCABULARY:
            raise ValueError(
                f"has tokens up to number {count - 1:,}; must have 1 to {MAX_VOCABULARY:,}"
            )
        names: dict[int, str] = {}
        for name, number in sorted(numbers.items()):
            if number in names:
                raise ValueError(
                    f"has number {number:,} for the tokens {names[number]!r} and {name!r}; "
                    "must have one token a number"
                )
            names[number] = name
        return tuple(names.get(number, f"unused {number}") for number in range(count))

    def require_usable(self) -> None:
        """Raise ValueError for a file without tokens, or whose tokens depend on random numbers."""
        dropout = self._process.metadata["dropout"]
        if dropout:
            raise ValueError(
                f"has model.dropout = {dropout:.6g}, by which tokens are drawn at random; must be "
                "null"
            )
        if not self.names:
            raise ValueError("has no tokens")

    def encode(self, text: str) -> np.ndarray:
        kind = ENCODE_SPECIAL if self.special_tokens else ENCODE
        return np.frombuffer(self._process.compute(kind, text.encode(), "a text"), np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        content = np.fromiter(tokens, np.int32).tobytes()
        return self._process.compute(DECODE, content, "tokens").decode()

    def to_bytes(self) -> bytes:
        return self.content


def parse_tokenizer(content: bytes, *, special_tokens: bool = False) -> Tokenizer:
    """Return the tokenizer of a file of this package or of the library. Raises ValueError for
    another content. With `special_tokens`, a tokenizer of the library adds its special tokens."""
    try:
        tree = json.loads(decode_utf8(content))
    except RecursionError:
        raise ValueError("isn't a tokenizer.json: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"isn't a tokenizer.json: {error}") from error
    match tree:
        case {"kind": "bytes"}:
            return ByteTokenizer()
        case {"kind": "characters", "characters": str(characters)} if characters:
            return CharacterTokenizer("".join(sorted(set(characters))))
        case {"kind": "words", "words": [*words]} if words and all(
            isinstance(word, str) for word in words
        ):
            return WordTokenizer(tuple(dict.fromkeys(words)))
        case {"model": _}:
            library = LibraryTokenizer(content, special_tokens)
            library.require_usable()
            return library
    raise ValueError("isn't a tokenizer.json: it has no model")


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
