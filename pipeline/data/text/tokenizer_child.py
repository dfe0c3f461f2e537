"""Child process of `tokenizer_process`: computes with the library `tokenizers` within limits.

A script that imports nothing else of this package, so that it starts in some 0.1 s. A request is a
letter, the number of bytes after it as uint64, and these bytes. So is its answer.
"""

from __future__ import annotations

import array
import json
import resource
import struct
import sys
from typing import Any, BinaryIO

HEAD = struct.Struct("<cQ")
FILE, ENCODE, ENCODE_SPECIAL, DECODE = b"f", b"e", b"s", b"d"
ANSWER, ERROR, NOT_INSTALLED = b"a", b"x", b"i"

_BASE_MEMORY_BYTES = 2**30
"""Addresses of a process that has read nothing, and those that the library allocates in advance."""
_MEMORY_PER_BYTE = 512
"""Addresses for a byte of the file or of a text; 100 to 180 were measured."""
_BASE_CPU_S = 10
_BYTES_PER_CPU_S = 100_000
"""Slowest speed, of all requests together; 550,000 to 860,000 were measured on busy cores."""


def memory_limit_bytes(total_bytes: int) -> int:
    """The limit of addresses after requests of so many bytes."""
    return _BASE_MEMORY_BYTES + _MEMORY_PER_BYTE * total_bytes


def cpu_limit_s(total_bytes: int) -> int:
    """The limit of processor time after requests of so many bytes."""
    return _BASE_CPU_S + total_bytes // _BYTES_PER_CPU_S


def main() -> None:
    """Answer requests until there are none."""
    available_bytes = int(sys.argv[1])
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    library, total_bytes = None, 0
    while head := requests.read(HEAD.size):
        kind, size_bytes = HEAD.unpack(head)
        total_bytes += size_bytes
        _limit(resource.RLIMIT_AS, min(available_bytes, memory_limit_bytes(total_bytes)))
        _limit(resource.RLIMIT_CPU, cpu_limit_s(total_bytes))
        try:
            content = requests.read(size_bytes)
            if kind == FILE:
                library = _read(content)
                _write(answers, ANSWER, json.dumps(_about(library)).encode())
            else:
                _write(answers, ANSWER, _compute(library, kind, content))
        except MemoryError:
            raise
        except ImportError as error:
            _write(answers, NOT_INSTALLED, str(error).encode())
        except BaseException as error:  # a panic of the library is no Exception
            _write(answers, ERROR, (str(error) or type(error).__name__).encode(errors="replace"))


def _limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _read(content: bytes) -> Any:
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(content.decode())
    library.no_padding()
    library.no_truncation()
    return library


def _about(library: Any) -> dict[str, Any]:
    """The vocabulary, and the share of merges that are left out at random."""
    dropout = getattr(library.model, "dropout", None)
    return {"vocabulary": library.get_vocab(), "dropout": dropout}


def _compute(library: Any, kind: bytes, content: bytes) -> bytes:
    """The tokens of a text as int32, or the text of tokens."""
    if kind == DECODE:
        text: str = library.decode(list(array.array("i", content)))
        return text.encode()
    encoding = library.encode(content.decode(), add_special_tokens=kind == ENCODE_SPECIAL)
    return array.array("i", encoding.ids).tobytes()


def _write(answers: BinaryIO, status: bytes, content: bytes) -> None:
    answers.write(HEAD.pack(status, len(content)))
    answers.write(content)
    answers.flush()


if __name__ == "__main__":
    main()
