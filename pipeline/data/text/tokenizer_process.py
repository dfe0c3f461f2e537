"""A tokenizer.json of the library `tokenizers`, computed by a process of limited memory and time.

The file may be a stranger's. Its replacements can grow a text without end, its expressions can take
hours, and the library aborts the process when it gets no memory. The process that calls the library
can catch none of that.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock
from typing import Any, cast

import numpy as np

from pipeline.data.text import tokenizer_child as child
from pipeline.errors import printable
from pipeline.host.memory import available_bytes

_SETTINGS: Mapping[str, str] = {
    "PYTHONSAFEPATH": "1",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


class TokenizerProcess:
    """A child process that has read a tokenizer.json. It ends when this object is dropped.

    Raises ValueError when the library isn't installed, can't read the file, or exceeds the limits.
    """

    about: Mapping[str, Any]
    """`vocabulary`, numbers by token, and `dropout`, the share of merges left out at random."""

    def __init__(self, content: bytes) -> None:
        # The library may be installed in a folder that only this process knows.
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, child.__file__, str(available_bytes())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_SETTINGS, "PYTHONPATH": path},
            # Ctrl-C is for this process, which finishes what it does.
            start_new_session=True,
        )
        weakref.finalize(self, _end, self._process)
        self._lock = Lock()
        self._total_bytes = 0
        self.about = json.loads(self._ask(child.FILE, content, "the file"))

    def encode(self, text: str, *, special_tokens: bool) -> np.ndarray:
        """The library's tokens, int32 (n,). Raises ValueError for its errors and limits."""
        kind = child.ENCODE_SPECIAL if special_tokens else child.ENCODE
        return np.frombuffer(self._ask(kind, text.encode(), "a text"), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """The library's text, without special tokens. Raises ValueError as `encode` does."""
        return self._ask(child.DECODE, tokens.astype(np.int32).tobytes(), "tokens").decode()

    def _ask(self, kind: bytes, content: bytes, what: str) -> bytes:
        """The answer to a request. Raises ValueError for an error, and when there is no answer."""
        with self._lock:
            self._total_bytes += len(content)
            try:
                status, answer = _exchange(self._process, kind, content)
            except (OSError, struct.error):
                reason = self._why_ended(f"{what} of {len(content):,} bytes")
                raise ValueError(_with_subject(kind, reason)) from None
        if status == child.NOT_INSTALLED:
            raise ValueError(
                "needs the library tokenizers: pip install 'recipe-pipeline[text]' "
                f"({answer.decode()})"
            )
        if status == child.ERROR:
            reason = answer.decode().partition("\n")[0]
            failure = "is no tokenizer.json" if kind == child.FILE else f"fails on {what}"
            raise ValueError(_with_subject(kind, f"{failure}: {printable(reason)}"))
        return answer

    def _why_ended(self, what: str) -> str:
        status = self._process.wait()
        if status == -signal.SIGXCPU:
            limit_s = child.cpu_limit_s(self._total_bytes)
            return (
                f"takes more than {limit_s} s of processor time for {what}; must have regular "
                "expressions that match faster"
            )
        # The library aborts and Python exits when they get no memory.
        limit_bytes = min(available_bytes(), child.memory_limit_bytes(self._total_bytes))
        return (
            f"takes more than {limit_bytes / 1e9:,.1f} GB of memory for {what}; must have "
            "replacements that are shorter"
        )


def _with_subject(kind: bytes, problem: str) -> str:
    # The caller names the file that it reads, which is a text's in other requests.
    return problem if kind == child.FILE else f"the tokenizer {problem}"


def _exchange(process: subprocess.Popen[bytes], kind: bytes, content: bytes) -> tuple[bytes, bytes]:
    """The status and the content of an answer. Raises OSError or struct.error without one."""
    requests, answers = cast(Any, process.stdin), cast(Any, process.stdout)
    requests.write(child.HEAD.pack(kind, len(content)))
    requests.write(content)
    requests.flush()
    status, size_bytes = child.HEAD.unpack(answers.read(child.HEAD.size))
    answer = answers.read(size_bytes)
    if len(answer) < size_bytes:
        raise struct.error
    return status, answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        # Closing writes what is left of a request that ended the process.
        with suppress(BrokenPipeError):
            cast(Any, pipe).close()
