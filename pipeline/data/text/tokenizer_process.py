"""A tokenizer.json of the library `tokenizers`, in a process with limited memory and time.

An untrusted file may have replacements that grow a text without end, or regular expressions that
take hours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.core.host.limited_process import (
    ChildLimitError,
    ChildLimits,
    LibraryError,
    LimitedProcess,
)
from pipeline.data.text.tokenizer_child import FILE

_BASE_MEMORY_BYTES = 2**30
"""Bytes of address space for a process that hasn't read anything, and the library."""
_MEMORY_PER_BYTE = 512
"""Bytes of address space for each byte of all requests so far. 100 to 180 were measured."""
_BASE_CPU_S = 10
_BYTES_PER_CPU_S = 100_000
"""The slowest accepted speed over all requests. 550,000 to 860,000 were measured on busy cores."""


class TokenizerProcess:
    """A child process that has read a tokenizer.json. It ends when this object is deleted. Raises
    ValueError if the library isn't installed, can't read the file, or exceeds the limits."""

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
