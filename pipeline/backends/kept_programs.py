"""Compiled programs that are found again by what they were made from, without tracing a step.

JAX's own cache finds a program by its text, for which the step is traced and lowered: half of the
time from the command to the first step of a small network. Here the key is a digest of what the
text is a function of (`pipeline.stages.compile`). A file holds what JAX knows of the compiled
program, and the name of the file in JAX's cache that has its machine code, beside which it lies,
with the same precautions: to load one is to run it.
"""

from __future__ import annotations

import hashlib
import io
import time
from dataclasses import replace
from typing import Any

import jax

from pipeline.backends.base import ProgramReport
from pipeline.core.files.compile_cache import ProgramFiles, opened_cache
from pipeline.core.host.jax_private import (
    ExecutablePickler,
    ExecutableUnpickler,
    is_machine_code,
    machine_code,
)


def find_program(
    key: str, args: tuple[Any, ...], result: Any, device: jax.Device
) -> tuple[Any, ProgramReport] | None:
    """Return the compiled program of a key, and what is known of it; None where none is kept.

    `args` are the shapes that it takes, `result` those that it gives.
    """
    started_at = time.perf_counter()
    cache = opened_cache(device)
    found = cache.get(_name(key, args)) if cache is not None else None
    if cache is None or found is None:
        return None
    try:
        loaded, shapes, no_kwargs, facts = _Reader(found, cache, device).load()
        compiled = jax.stages.Compiled(
            loaded.load(),
            [],
            jax.tree.unflatten(jax.tree.structure((args, {})), shapes),
            jax.tree.structure(result),
            no_kwargs=no_kwargs,
        )
    except Exception:  # as from another version of what wrote it: of any type
        return None
    seconds = time.perf_counter() - started_at
    return compiled, replace(facts, compile_s=seconds, cache="hit")


def keep_program(
    key: str,
    args: tuple[Any, ...],
    result: Any,
    device: jax.Device,
    compiled: Any,
    facts: ProgramReport,
) -> None:
    """Keep a program that this thread has compiled last, if its results are like `result`.

    Nothing is kept of one that JAX's cache has not.
    """
    cache = opened_cache(device)
    code = cache.newest_key if cache is not None else None
    if cache is None or code is None or _structure(result) != compiled.out_tree:
        return
    shapes, structure = jax.tree.flatten(compiled.args_info)
    if structure != _structure((args, {})) or compiled._params.const_args:
        return
    content = io.BytesIO()
    try:
        unloaded = compiled._executable._unloaded_executable
        _Writer(content, code).dump((unloaded, shapes, compiled._no_kwargs, facts))
    except Exception:  # as for a program with callbacks: of any type
        return
    cache.put(_name(key, args), content.getvalue())


class _Writer(ExecutablePickler):  # type: ignore[misc]
    """Writes the key of JAX's cache in place of machine code. XLA writes that of a program which it
    has read itself without some of its functions (jaxlib 0.10.2)."""

    def __init__(self, file: io.BytesIO, code: str) -> None:
        super().__init__(file)
        self._code = code

    def persistent_id(self, obj: Any) -> Any:
        """Return what stands for an object of the device's client."""
        return ("exec", self._code) if is_machine_code(obj) else super().persistent_id(obj)


class _Reader(ExecutableUnpickler):  # type: ignore[misc]
    """Reads what `_Writer` wrote, and machine code from JAX's cache."""

    def __init__(self, content: bytes, cache: ProgramFiles, device: jax.Device) -> None:
        super().__init__(io.BytesIO(content), device.client, [device])
        self._cache = cache

    def persistent_load(self, pid: Any) -> Any:
        """Return the object that a persistent id stands for. Raises KeyError for lost code."""
        kind, *of_kind = pid
        if kind == "exec":
            kept = self._cache.get(of_kind[0])
            if kept is None:
                raise KeyError(of_kind[0])
            pid = kind, machine_code(kept)
        return super().persistent_load(pid)


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def _name(key: str, args: tuple[Any, ...]) -> str:
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(args)]
    described = key, repr(shapes), str(jax.tree.structure(args))
    return f"kept-{hashlib.sha256(chr(0).join(described).encode()).hexdigest()}"
