"""The child process of a `LimitedProcess`: it answers requests within limits."""

from __future__ import annotations

import resource
import struct
import sys
from collections.abc import Callable, Sequence

REQUEST = struct.Struct("<cQQQ")
"""Head of a request: its kind (a letter), the limits of the address space in bytes and of processor
time in seconds, and the size of the content, which follows."""
ANSWER = struct.Struct("<cQ")
"""Head of an answer: its status, and the size of the content, which follows."""
DONE = b"a"
FAILED = b"x"
NOT_INSTALLED = b"i"
"""Statuses of an answer."""

Compute = Callable[[bytes, bytes], Sequence[bytes | memoryview]]
"""Function that returns the pieces of the answer for a request's kind and content. The user reads
the messages of its errors."""


def serve(compute: Compute) -> None:
    """Answer requests until stdin ends."""
    requests = sys.stdin.buffer
    answers = sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while head := requests.read(REQUEST.size):
        kind, memory_bytes, cpu_s, size_bytes = REQUEST.unpack(head)
        _set_limit(resource.RLIMIT_AS, memory_bytes)
        _set_limit(resource.RLIMIT_CPU, cpu_s)
        status, answer = _answer(compute, kind, requests.read(size_bytes))
        answers.write(ANSWER.pack(status, sum(len(piece) for piece in answer)))
        for piece in answer:
            answers.write(piece)
        answers.flush()


def _answer(
    compute: Compute, kind: bytes, content: bytes
) -> tuple[bytes, Sequence[bytes | memoryview]]:
    try:
        return DONE, compute(kind, content)
    except MemoryError:
        # The library's state is unknown. The parent sees that this process has ended.
        sys.exit(1)
    except ImportError as error:
        return NOT_INSTALLED, [str(error).encode()]
    except BaseException as error:  # a panic of a library in Rust isn't an Exception
        return FAILED, [(str(error) or type(error).__name__).encode(errors="replace")]


def _set_limit(kind: int, limit: int) -> None:
    """Set the soft limit of a resource, at most to the hard limit."""
    hard_limit = resource.getrlimit(kind)[1]
    soft_limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
    resource.setrlimit(kind, (soft_limit, hard_limit))
