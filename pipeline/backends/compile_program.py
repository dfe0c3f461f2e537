"""Compile a program before its first call: at once, or in a thread while another program runs."""

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
from pipeline.core.host.jax_private import disable_compile_cache, merge_equal_operations
from pipeline.models.lowerings.formulas.onednn import CALLS

_LOCK = threading.Lock()


@dataclass(frozen=True)
class ProgramSpec:
    """A program to compile."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: int | None = None
    """Index of the argument whose memory the program may use again; None: it may use none."""
    out_shardings: Any = None
    """Shardings of the results; None if they follow from the arguments."""
    compiler_options: dict[str, str | bool] | None = None
    in_shardings: Any = None
    """Shardings and layouts of the arguments; None: as in `args`."""
    platforms: tuple[str, ...] | None = None
    """Platforms of an absent device, whose programs aren't cached; None: the platform of `args`."""
    merges_operations: bool = False
    """Whether equal operations are merged before XLA optimizes the program."""
    key: str | None = None
    """Digest of everything that determines the program, by which it is stored on disk; None: it
    isn't stored. The results of a program with a key have the shapes of the donated argument."""

    def with_options(self, options: dict[str, str | bool]) -> ProgramSpec:
        """Return the program with more options of the compiler; options that are set stay."""
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
    """Return a compiled program and its report. Raises RunError with the first line of XLA's error.

    A program that XLA's cache can't hold is compiled once in a process for the same `devices`.
    """
    stored = find_compiled(spec, devices)
    if stored is not None:
        return stored
    started_at = time.perf_counter()
    # Runs of a sweep compile in threads. It is faster if they compile one after the other.
    with _LOCK, watch_compiler(spec.name, watch) as events:
        lowered = _lower_program(spec)
        # XLA neither counts the operations of oneDNN's calls nor writes them to a file.
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
        lowered = program.lower(*spec.args)
    else:
        lowered = program.trace(*spec.args).lower(lowering_platforms=spec.platforms)
    if spec.merges_operations:
        merge_equal_operations(lowered)
    return lowered


@contextmanager
def watch_compiler(name: str, watch: ProgressClock) -> Iterator[list[str]]:
    """Show a clock during the body, and yield a list of JAX's events in this thread, which grows.
    Raises RunError for XLA's errors."""
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
    """Return "miss" if the cache lacked a program that JAX compiled, "off" if it wasn't used."""
    if "/jax/compilation_cache/cache_misses" in events:
        return "miss"
    return "hit" if "/jax/compilation_cache/cache_hits" in events else "off"


class LaterProgram:
    """A program that a thread compiles. A call waits for the thread, and raises its errors."""

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

    With `notify`, a program that isn't on disk is compiled later, and `notify` gets its report.
    """
    if notify is None:
        return compile_program(spec, watch, devices)
    stored = find_compiled(spec, devices)
    if stored is not None:
        return stored

    def compile_() -> Any:
        # Without a clock, since training shows its own progress.
        program, report = compile_program(spec, lambda _: nullcontext(), devices)
        notify(report)
        return program

    return LaterProgram(compile_), None
