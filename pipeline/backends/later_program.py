"""A program that is compiled while another one runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import jax

from pipeline.backends.base import ProgramReport, ProgressClock
from pipeline.backends.compile_program import ProgramSpec, compile_program, find_compiled


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


def compile_later(
    spec: ProgramSpec,
    watch: ProgressClock,
    devices: Sequence[jax.Device],
    notify: Callable[[ProgramReport], None] | None,
) -> tuple[Any, ProgramReport | None]:
    """Find a kept program, or prepare to compile it later and then call `notify` with its facts.

    Without `notify` it is compiled at once. A later program has no facts yet, but None.
    """
    if notify is None:
        return compile_program(spec, watch, devices)
    found = find_compiled(spec, devices)
    if found is not None:
        return found

    def compile_() -> Any:
        # No clock: training shows its own progress.
        program, facts = compile_program(spec, lambda _: nullcontext(), devices)
        notify(facts)
        return program

    return LaterProgram(compile_), None
