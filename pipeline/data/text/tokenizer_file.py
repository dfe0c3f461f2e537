"""Tokenizers of files tokenizer.json, of this package and of the library `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.core.host.limited_process import (
    ChildLimitError,
    ChildLimits,
    LibraryError,
    LimitedProcess,
)
from pipeline.data.text.tokenizer import (
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    WordTokenizer,
    decode_utf8,
)
from pipeline.data.text.tokenizer_child import DECODE, ENCODE, ENCODE_SPECIAL, FILE

MAX_VOCABULARY = 1 << 20
"""Most different tokens of a tokenizer.json. The network has an output for each."""
_BASE_MEMORY_BYTES = 2**30
"""Bytes of address space for a process that hasn't read anything, and the library."""
_MEMORY_PER_BYTE = 512
"""Bytes of address space for each byte of all requests so far. 100 to 180 were measured."""
_BASE_CPU_S = 10
_BYTES_PER_CPU_S = 100_000
"""The slowest accepted speed over all requests. 550,000 to 860,000 were measured on busy cores."""


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
    has_special_tokens = True

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
