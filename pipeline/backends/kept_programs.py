"""Compiled programs that are reused: from disk by later processes, from memory by later runs.

The key of a program is a SHA-256 of texts that determine it. For a program on disk, they describe
everything that the step is made from (`pipeline.stages.compile`), so the step isn't traced. To find
a program in JAX's own cache, every start has to trace and lower it first. A file has JAX's metadata
of a compiled program, and the name of the file in JAX's cache with the machine code. Both files are
in one folder, with the same precautions, since loading a program runs its code.

Programs that call oneDNN are in memory, by their StableHLO, since jaxlib 0.10.2 can't write them to
a file: it fails with `std::bad_alloc` (`CustomCallThunkToProto` gets a `OneDnnOpThunk`). Jobs of a
sweep share one program if they differ only in learning rates, seeds and lengths.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from pipeline.backends.base import ProgramReport
from pipeline.core.files.compile_cache import ProgramFiles, find_opened_cache
from pipeline.core.host.jax_private import (
    ExecutablePickler,
    ExecutableUnpickler,
    is_machine_code,
    read_machine_code,
)

MAX_IN_MEMORY = 4
"""Largest number of programs in memory: the last two networks', some megabytes each."""
_SCOPES = re.compile(r'loc\("([^"]*/[^"]*)"\(')
"""Paths of layers and operations in a program's text; names of Python's functions have no slash."""
_LOCK = threading.Lock()
_IN_MEMORY: OrderedDict[tuple[str, tuple[jax.Device, ...]], Any] = OrderedDict()


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
    with _LOCK:
        if memory_key in _IN_MEMORY:
            _IN_MEMORY.move_to_end(memory_key)
            return _IN_MEMORY[memory_key], True
    program = compile_()
    with _LOCK:
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
