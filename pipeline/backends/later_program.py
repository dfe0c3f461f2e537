"""A program that is compiled while another one runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class LaterProgram:
    """A program that `begin` compiles in a thread, for which the first call waits.

    What compiling raised is raised by the next `begin` or call.
    """

    def __init__(self, compile_: Callable[[], Callable[..., Any]]) -> None:
        self._compile = compile_
        self._compiled: Future[Callable[..., Any]] | None = None

    def begin(self) -> None:
        """Begin to compile; from the second time on, see whether that has failed."""
        if self._compiled is None:
            threads = ThreadPoolExecutor(1, thread_name_prefix="compile")
            self._compiled = threads.submit(self._compile)
            threads.shutdown(wait=False)
        elif self._compiled.done():
            self._compiled.result()

    def __call__(self, *args: Any) -> Any:
        """Call the program, once it is compiled."""
        self.begin()
        assert self._compiled is not None
        return self._compiled.result()(*args)
