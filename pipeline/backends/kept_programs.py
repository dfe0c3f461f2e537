"""Compiled programs that are found again by what they were made from, without tracing a step.

JAX's own cache finds a program by its text, for which the step is traced and lowered: half of the
time from the command to the first step of a small network. Here the key is a digest of what the
text is a function of (`pipeline.stages.program_key`). The files lie beside those of JAX's cache,
with the same precautions, for to load one is to run it.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from dataclasses import replace
from typing import Any

import jax
from jax.experimental import serialize_executable

from pipeline.backends.base import Program
from pipeline.files.compile_cache import opened_cache


def find_program(
    key: str, args: tuple[Any, ...], result: Any, device: jax.Device
) -> tuple[Any, Program] | None:
    """Return the compiled program of a key, and what is known of it; None where none is kept.

    `args` are the shapes that it takes, `result` those that it gives.
    """
    started_at = time.perf_counter()
    cache = opened_cache(device)
    found = cache.get(_name(key, args)) if cache is not None else None
    if found is None:
        return None
    try:
        program, facts = pickle.loads(found)
        structure, output = jax.tree.structure((args, {})), jax.tree.structure(result)
        compiled = serialize_executable.deserialize_and_load(
            program, structure, output, device.client, [device]
        )
    except Exception:  # of another version of what wrote it, whose errors are of any type
        return None
    seconds = time.perf_counter() - started_at
    return compiled, replace(facts, compile_s=seconds, cache="hit")


def keep_program(
    key: str,
    args: tuple[Any, ...],
    result: Any,
    device: jax.Device,
    compiled: Any,
    facts: Program,
) -> None:
    """Keep a compiled program, unless what it gives is not of the shapes of `result`."""
    cache = opened_cache(device)
    if cache is None or compiled.out_tree != jax.tree.structure(result):
        return
    try:
        program, structure, _ = serialize_executable.serialize(compiled)
        content = pickle.dumps((program, facts))
    except Exception:  # as for a program that XLA can't write
        return
    if structure == jax.tree.structure((args, {})):
        cache.put(_name(key, args), content)


def _name(key: str, args: tuple[Any, ...]) -> str:
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(args)]
    described = key, repr(shapes), str(jax.tree.structure(args))
    return f"kept-{hashlib.sha256(chr(0).join(described).encode()).hexdigest()}"
