"""Compiling one program ahead of time, and what is known of it then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax

from pipeline.backends.base import Program, ProgressClock
from pipeline.backends.programs_in_process import compiled_once
from pipeline.errors import RunError
from pipeline.files.compile_cache import no_compile_cache
from pipeline.lowerings.formulas.onednn import CALLS

_LOCK = threading.Lock()


@dataclass(frozen=True)
class ProgramSpec:
    """A program to compile; `donated` is the argument whose memory it may reuse."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: int | None = None
    out_shardings: Any = None
    """Where results lie; None where that follows from the arguments."""
    compiler_options: dict[str, str | bool] | None = None
    in_shardings: Any = None
    """Where arguments lie, and in which layouts; None where they say so themselves."""
    platforms: tuple[str, ...] | None = None
    """Platforms to compile for where no device of theirs is there; None: that of the arguments."""
    cached: bool = True

    def with_options(self, options: dict[str, str | bool]) -> ProgramSpec:
        """The same program with more options of the compiler; its own win."""
        if not options:
            return self
        return replace(self, compiler_options={**options, **(self.compiler_options or {})})


def compile_program(
    spec: ProgramSpec, watch: ProgressClock, devices: Sequence[jax.Device] = ()
) -> tuple[Any, Program]:
    """Compile ahead of time. Raises RunError with XLA's first line where it refuses.

    A program that XLA's cache can't keep is compiled once in a process for the same `devices`.
    """
    started_at = time.perf_counter()
    # Runs of a sweep may compile in threads, and JAX's cache is switched for all of them.
    with _LOCK, watch(spec.name), cache_events() as events, xla_errors(spec.name):
        lowered = _lowered(spec)
        # XLA does not look into the calls of another library, and can't keep them.
        foreign, options = CALLS in lowered.as_text(), spec.compiler_options
        compile_ = partial(lowered.compile, compiler_options=options)
        reused = False
        if spec.cached and not foreign:
            compiled = compile_()
        else:
            with no_compile_cache():
                if foreign:
                    compiled, reused = compiled_once(lowered, options, devices, compile_)
                else:
                    compiled = compile_()
    seconds = time.perf_counter() - started_at
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    kept = cache_outcome(events) if spec.cached and not foreign else "off"
    return compiled, Program(
        name=spec.name,
        compile_s=seconds,
        cache="reused" if reused else kept,
        temporary_bytes=int(memory.temp_size_in_bytes) if memory is not None else 0,
        flops=cost.get("flops") if cost and not foreign else None,
        calls_onednn=foreign,
    )


def _lowered(spec: ProgramSpec) -> Any:
    given = {} if spec.in_shardings is None else {"in_shardings": spec.in_shardings}
    program = jax.jit(
        spec.function, donate_argnums=spec.donated, out_shardings=spec.out_shardings, **given
    )
    if spec.platforms is None:
        return program.lower(*spec.args)
    return program.trace(*spec.args).lower(lowering_platforms=spec.platforms)


@contextmanager
def xla_errors(name: str) -> Iterator[None]:
    """Raise RunError with XLA's first line where it refuses a program."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise RunError(f"compiling {name}: {str(error).splitlines()[0]}") from error


@contextmanager
def cache_events() -> Iterator[list[str]]:
    """Collect the events of JAX within the context."""
    events: list[str] = []

    def listen(event: str, **_: object) -> None:
        events.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(listen)


def cache_outcome(events: list[str]) -> Literal["hit", "miss", "off"]:
    """Whether the cache had all programs that were compiled meanwhile."""
    if "/jax/compilation_cache/cache_misses" in events:
        return "miss"
    return "hit" if "/jax/compilation_cache/cache_hits" in events else "off"
