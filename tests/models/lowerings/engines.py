"""Which engines this machine can be tested with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import jax
import pytest

from pipeline.models.lowerings.problem import Engine
from pipeline.models.lowerings.tune.machine import find_engines


@cache
def engines_here(dtype: str) -> frozenset[Engine]:
    """Those that a run would find; probed once a process, for no folder keeps it."""
    with tempfile.TemporaryDirectory() as folder:
        return find_engines(jax.devices("cpu")[0], dtype, Path(folder))


def require(engine: Engine, dtype: str) -> None:
    """Skip a test that needs an engine that is not here."""
    if engine not in engines_here(dtype):
        pytest.skip(f"{engine} does not pass its probe in {dtype} on this machine")


@contextmanager
def keep_no_programs() -> Iterator[None]:
    """Programs that call oneDNN can't be written to XLA's cache, which earlier runs switched on."""
    key = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[key]
    jax.config.update(key, float("inf"))
    try:
        yield
    finally:
        jax.config.update(key, before)
