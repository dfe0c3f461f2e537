"""Compile a program before its first call, and reuse compiled programs.

A program is compiled at once, or in a thread while another program runs. It is reused from disk by
later processes, from memory by later runs.

The key of a program is a SHA-256 of texts that determine it. For a program on disk, they describe
everything that the step is made from (`pipeline.stages.compile`), so the step isn't traced. To find
a program in JAX's own cache, every start has to trace and lower it first. A file has JAX's metadata
of a compiled program, and the name of the file in JAX's cache with the machine code. Both files are
in one folder, with the same precautions, since loading a program runs its code.

Programs with jaxlib's calls of oneDNN are in memory, by their StableHLO, since jaxlib 0.10.2 can't
write them to a file: it fails with `std::bad_alloc` (`CustomCallThunkToProto` gets a
`OneDnnOpThunk`). Jobs of a sweep share one program if they differ only in learning rates, seeds and
lengths. Programs with calls of the library that is built on this machine are on disk.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax

from pipeline.backends.base import ProgramReport, ProgressClock
from pipeline.core.errors import RunError
from pipeline.core.files.compile_cache import ProgramFiles, find_opened_cache
from pipeline.core.host.jax_private import (
    ExecutablePickler,
    ExecutableUnpickler,
    is_machine_code,
    keep_from_cache,
    merge_equal_operations,
    read_machine_code,
)
from pipeline.models.lowerings.formulas.onednn import CALLS, LIBRARY_CALLS

_COMPILE_LOCK = threading.Lock()
MAX_IN_MEMORY = 4
"""Largest number of programs in memory: the last two networks', some megabytes each."""
_SCOPES = re.compile(r'loc\("([^"]*/[^"]*)"\(')
"""Paths of layers and operations in a program's text; names of Python's functions have no slash."""
_MEMORY_LOCK = threading.Lock()
_IN_MEMORY: OrderedDict[tuple[str, tuple[jax.Device, ...]], Any] = OrderedDict()


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
    with _COMPILE_LOCK, watch_compiler(spec.name, watch) as events:
        lowered = _lower_program(spec)
        # XLA can't write jaxlib's calls to a file, and doesn't count the operations of any.
        text = lowered.as_text()
        calls_onednn = CALLS in text
        is_counted = not calls_onednn and LIBRARY_CALLS not in text
        is_cacheable = spec.platforms is None and not calls_onednn
        compile_ = partial(lowered.compile, compiler_options=spec.compiler_options)
        reused = False
        with nullcontext() if is_cacheable else keep_from_cache():
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
        flops=cost.get("flops") if cost and is_counted else None,
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


def digest(texts: Sequence[str]) -> str:
    """Return the key of a program: SHA-256 of the texts that determine it."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def compile_once(
    lowered: Any,
    options: Mapping[str, Any] | None,
    devices: Sequence[jax.Device],
    compile_: Callable[[], Any],
) -> tuple[Any, bool]:
    """Return the compiled form of a lowered program, and whether it was in memory.

    Programs are equal if their StableHLO, names of layers, options and devices are. Devices of a
    client that JAX has closed differ from a new client's. Source locations may differ, since
    they depend on the place that a run is started from.
    """
    scopes = sorted(set(_SCOPES.findall(lowered.as_text(debug_info=True))))
    trees = str(lowered.in_tree), str(lowered.out_tree)
    key = digest([lowered.as_text(), *scopes, repr(sorted((options or {}).items())), *trees])
    memory_key = key, tuple(devices)
    with _MEMORY_LOCK:
        if memory_key in _IN_MEMORY:
            _IN_MEMORY.move_to_end(memory_key)
            return _IN_MEMORY[memory_key], True
    program = compile_()
    with _MEMORY_LOCK:
        _IN_MEMORY[memory_key] = program
        while len(_IN_MEMORY) > MAX_IN_MEMORY:
            _IN_MEMORY.popitem(last=False)
    return program, False


def find_program(
    key: str, args: tuple[Any, ...], result: Any, device: jax.Device
) -> tuple[Any, ProgramReport] | None:
    """Return the program on disk and its report; None if none exists for this key and `args`.
    `result` has the tree of its results."""
    started_at = time.perf_counter()
    cache = find_opened_cache(device)
    content = cache.get(_make_file_key(key, args)) if cache is not None else None
    if cache is None or content is None:
        return None
    try:
        loaded, shapes, no_kwargs, report = _Reader(content, cache, device).load()
        compiled = jax.stages.Compiled(
            loaded.load(),
            [],
            jax.tree.unflatten(jax.tree.structure((args, {})), shapes),
            jax.tree.structure(result),
            no_kwargs=no_kwargs,
        )
    except Exception:  # If another version wrote the file, any error is possible.
        return None
    return compiled, replace(report, compile_s=time.perf_counter() - started_at, cache="hit")


def keep_program(
    key: str,
    args: tuple[Any, ...],
    result: Any,
    device: jax.Device,
    compiled: Any,
    report: ProgramReport,
) -> None:
    """Write the program that this thread compiled last, for `find_program`.

    A program is left out if JAX's cache doesn't have it, if its results don't have the tree of
    `result`, or if it can't be pickled.
    """
    cache = find_opened_cache(device)
    code = cache.newest_key if cache is not None else None
    results: Any = jax.tree.structure(result)
    if cache is None or code is None or results != compiled.out_tree:
        return
    arguments: Any = jax.tree.structure((args, {}))
    shapes, structure = jax.tree.flatten(compiled.args_info)
    # Constants that JAX passes as further arguments aren't in the file.
    if structure != arguments or compiled._params.const_args:
        return
    content = io.BytesIO()
    try:
        unloaded = compiled._executable._unloaded_executable
        _Writer(content, code).dump((unloaded, shapes, compiled._no_kwargs, report))
    except Exception:  # Programs with callbacks, for example, can't be pickled.
        return
    cache.put(_make_file_key(key, args), content.getvalue())


def _make_file_key(key: str, args: tuple[Any, ...]) -> str:
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(args)]
    return f"kept-{digest([key, repr(shapes), str(jax.tree.structure(args))])}"


class _Writer(ExecutablePickler):  # type: ignore[misc]
    """Writes the key of machine code in JAX's cache in place of the code.

    If XLA writes machine code that it has read from a file, functions are lost (jaxlib 0.10.2).
    """

    def __init__(self, file: io.BytesIO, code: str) -> None:
        super().__init__(file)
        self._code = code

    def persistent_id(self, obj: Any) -> Any:
        return ("exec", self._code) if is_machine_code(obj) else super().persistent_id(obj)


class _Reader(ExecutableUnpickler):  # type: ignore[misc]
    """Reads a file of `_Writer`, and machine code from JAX's cache."""

    def __init__(self, content: bytes, cache: ProgramFiles, device: jax.Device) -> None:
        super().__init__(io.BytesIO(content), device.client, [device])
        self._cache = cache

    def persistent_load(self, pid: Any) -> Any:
        """Return the object of a persistent id. Raises KeyError if JAX's cache lacks the code."""
        kind, *names = pid
        if kind == "exec":
            code = self._cache.get(names[0])
            if code is None:
                raise KeyError(names[0])
            pid = kind, read_machine_code(code)
        return super().persistent_load(pid)
