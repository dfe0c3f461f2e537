"""Compile a program ahead of time: at once, or in a thread while another program runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax

from pipeline.backends.base import ProgramReport, ProgressClock
from pipeline.backends.kept_programs import compile_once, find_program, keep_program
from pipeline.core.errors import RunError
from pipeline.core.host.jax_private import disable_compile_cache
from pipeline.models.lowerings.formulas.onednn import CALLS

_LOCK = threading.Lock()


@dataclass(frozen=True)
class ProgramSpec:
    """A program to compile; `donated` is the index of the argument whose memory it may reuse."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: int | None = None
    out_shardings: Any = None
    """Shardings of the results; None if they follow from the arguments."""
    compiler_options: dict[str, str | bool] | None = None
    in_shardings: Any = None
    """Shardings and layouts of the arguments; None if the arguments have them."""
    platforms: tuple[str, ...] | None = None
    """Platforms of an absent device, whose programs aren't cached; None: the arguments'."""
    key: str | None = None
    """Digest of everything that decides the program, its key on disk; None if unknown. The results
    of a program with a key have the shapes of the donated argument."""

    def with_options(self, options: dict[str, str | bool]) -> ProgramSpec:
        """Add options of the compiler, except those that are already set."""
        if not options:
            return self
        return replace(self, compiler_options={**options, **(self.compiler_options or {})})

    @property
    def full_key(self) -> str:
        """The key with the name and the options."""
        options = sorted((self.compiler_options or {}).items())
        return f"{self.key} {self.name} {self.donated} {options!r}"


def compile_program(
    spec: ProgramSpec, watch: ProgressClock, devices: Sequence[jax.Device] = ()
) -> tuple[Any, ProgramReport]:
    """Compile ahead of time. Raises RunError with the first line of XLA's error.

    A program that XLA's cache can't hold is compiled once in a process for the same `devices`.
    """
    on_disk = find_compiled(spec, devices)
    if on_disk is not None:
        return on_disk
    started_at = time.perf_counter()
    # Runs of a sweep may compile in threads: one after the other is faster.
    with _LOCK, watch_compiler(spec.name, watch) as events:
        lowered = _lower_program(spec)
        # XLA doesn't count the work of another library's calls, and can't write them to a file.
        calls_onednn = CALLS in lowered.as_text()
        is_cacheable = spec.platforms is None and not calls_onednn
        compile_ = partial(lowered.compile, compiler_options=spec.compiler_options)
        reused = False
        with nullcontext() if is_cacheable else disable_compile_cache():
            if calls_onednn:
                compiled, reused = compile_once(lowered, spec.compiler_options, devices, compile_)
            else:
                compiled = compile_()
    seconds = time.perf_counter() - started_at
    outcome = find_cache_outcome(events) if is_cacheable else "off"
    cost = compiled.cost_analysis()
    report = ProgramReport(
        name=spec.name,
        compile_s=seconds,
        cache="reused" if reused else outcome,
        temporary_bytes=count_temporary_bytes(compiled),
        flops=cost.get("flops") if cost and not calls_onednn else None,
        calls_onednn=calls_onednn,
    )
    if spec.key is not None and spec.donated is not None and outcome != "off":
        result = spec.args[spec.donated]
        keep_program(spec.full_key, spec.args, result, devices[0], compiled, report)
    return compiled, report


def count_temporary_bytes(compiled: Any) -> int:
    """Return the bytes of a program's temporaries; 0 if unknown."""
    memory = compiled.memory_analysis()
    return int(memory.temp_size_in_bytes) if memory is not None else 0


def find_compiled(
    spec: ProgramSpec, devices: Sequence[jax.Device]
) -> tuple[Any, ProgramReport] | None:
    """Return the program that an earlier process compiled for the same key, or None."""
    if spec.key is None or spec.donated is None:
        return None
    return find_program(spec.full_key, spec.args, spec.args[spec.donated], devices[0])


def _lower_program(spec: ProgramSpec) -> Any:
    shardings = {} if spec.in_shardings is None else {"in_shardings": spec.in_shardings}
    program = jax.jit(
        spec.function, donate_argnums=spec.donated, out_shardings=spec.out_shardings, **shardings
    )
    if spec.platforms is None:
        return program.lower(*spec.args)
    return program.trace(*spec.args).lower(lowering_platforms=spec.platforms)


@contextmanager
def watch_compiler(name: str, watch: ProgressClock) -> Iterator[list[str]]:
    """Show progress, and collect JAX's events of this thread. Raises RunError for XLA's errors."""
    events: list[str] = []
    thread = threading.get_ident()

    def listen(event: str, **_: object) -> None:
        if threading.get_ident() == thread:
            events.append(event)

    jax.monitoring.register_event_listener(listen)
    with watch(name):
        try:
            yield events
        except jax.errors.JaxRuntimeError as error:
            raise RunError(f"compiling {name}: {str(error).splitlines()[0]}") from error
        finally:
            jax.monitoring.unregister_event_listener(listen)


def find_cache_outcome(events: list[str]) -> Literal["hit", "miss", "off"]:
    """Return whether the cache had all programs that JAX compiled; off: the cache wasn't used."""
    if "/jax/compilation_cache/cache_misses" in events:
        return "miss"
    return "hit" if "/jax/compilation_cache/cache_hits" in events else "off"


class LaterProgram:
    """A program that `begin` compiles in a thread; a call waits for it, and raises its errors."""

    def __init__(self, compile_: Callable[[], Callable[..., Any]]) -> None:
        self._compile = compile_
        self._compiled: Future[Callable[..., Any]] | None = None

    def begin(self) -> None:
        """Start to compile at the first call. Later calls raise the error if compiling failed."""
        if self._compiled is None:
            threads = ThreadPoolExecutor(1, thread_name_prefix="compile")
            self._compiled = threads.submit(self._compile)
            threads.shutdown(wait=False)
        elif self._compiled.done():
            self._compiled.result()

    def __call__(self, *args: Any) -> Any:
        self.begin()
        assert self._compiled is not None
        return self._compiled.result()(*args)


def compile_later(
    spec: ProgramSpec,
    watch: ProgressClock,
    devices: Sequence[jax.Device],
    notify: Callable[[ProgramReport], None] | None,
) -> tuple[Any, ProgramReport | None]:
    """Return a program and its report, or a `LaterProgram` and None.

    The program is compiled later if it isn't on disk, and `notify`, for the report, isn't None.
    """
    if notify is None:
        return compile_program(spec, watch, devices)
    on_disk = find_compiled(spec, devices)
    if on_disk is not None:
        return on_disk

    def compile_() -> Any:
        # No clock: training shows its own progress.
        program, report = compile_program(spec, lambda _: nullcontext(), devices)
        notify(report)
        return program

    return LaterProgram(compile_), None
