"""The side of a child process that computes within limits for a `LimitedProcess`."""

from __future__ import annotations

import resource
import struct
import sys
from collections.abc import Callable, Sequence

REQUEST = struct.Struct("<cQQQ")
"""A letter, the limits of addresses in bytes and of processor time in s, and the size of what
follows."""
ANSWER = struct.Struct("<cQ")
"""Whether it is an answer, and the size of what follows."""
DONE = b"a"
FAILED = b"x"
NOT_INSTALLED = b"i"

Compute = Callable[[bytes, bytes], Sequence[bytes | memoryview]]
"""Answers a request of a letter and its content. The message of what it raises is for the user."""


def serve(compute: Compute) -> None:
    """Answer requests until there are none."""
    requests = sys.stdin.buffer
    answers = sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while head := requests.read(REQUEST.size):
        kind, memory_bytes, cpu_s, size_bytes = REQUEST.unpack(head)
        _limit(resource.RLIMIT_AS, memory_bytes)
        _limit(resource.RLIMIT_CPU, cpu_s)
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
        # Nothing can be trusted now. The other side sees that this process ended.
        sys.exit(1)
    except ImportError as error:
        return NOT_INSTALLED, [str(error).encode()]
    except BaseException as error:  # a panic of a library in Rust isn't an Exception
        return FAILED, [(str(error) or type(error).__name__).encode(errors="replace")]


def _limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
