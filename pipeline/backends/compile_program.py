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

from pipeline.backends.base import ProgramReport, ProgressClock
from pipeline.backends.kept_programs import find_program, keep_program
from pipeline.backends.programs_in_process import compiled_once
from pipeline.core.errors import RunError
from pipeline.core.files.compile_cache import no_compile_cache
from pipeline.models.lowerings.formulas.onednn import CALLS

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
    key: str | None = None
    """A digest of what it is made from, by which it is found again; None where that is unknown."""
    gives: int | None = None
    """The argument that results are like, for a program with a key."""

    def with_options(self, options: dict[str, str | bool]) -> ProgramSpec:
        """The same program with more options of the compiler; its own win."""
        if not options:
            return self
        return replace(self, compiler_options={**options, **(self.compiler_options or {})})


def compile_program(
    spec: ProgramSpec, watch: ProgressClock, devices: Sequence[jax.Device] = ()
) -> tuple[Any, ProgramReport]:
    """Compile ahead of time. Raises RunError with XLA's first line where it refuses.

    A program that XLA's cache can't keep is compiled once in a process for the same `devices`.
    """
    found = find_compiled(spec, devices)
    if found is not None:
        return found
    started_at = time.perf_counter()
    # Runs of a sweep may compile in threads: one after the other is faster.
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
    facts = ProgramReport(
        name=spec.name,
        compile_s=seconds,
        cache="reused" if reused else kept,
        temporary_bytes=int(memory.temp_size_in_bytes) if memory is not None else 0,
        flops=cost.get("flops") if cost and not foreign else None,
        calls_onednn=foreign,
    )
    if spec.key is not None and spec.gives is not None and kept != "off":
        result = spec.args[spec.gives]
        keep_program(_full_key(spec), spec.args, result, devices[0], compiled, facts)
    return compiled, facts


def find_compiled(
    spec: ProgramSpec, devices: Sequence[jax.Device]
) -> tuple[Any, ProgramReport] | None:
    """Return the program that an earlier process has compiled from the same; None without one."""
    if spec.key is None or spec.gives is None:
        return None
    return find_program(_full_key(spec), spec.args, spec.args[spec.gives], devices[0])


def _full_key(spec: ProgramSpec) -> str:
    options = sorted((spec.compiler_options or {}).items())
    return f"{spec.key} {spec.name} {spec.donated} {options!r}"


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
    """Collect the events of JAX in this thread within the context."""
    events: list[str] = []
    own = threading.get_ident()

    def listen(event: str, **_: object) -> None:
        if threading.get_ident() == own:
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
