"""XLA's persistent cache of compiled programs, and what must not get into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

_SHORTEST_S = "jax_persistent_cache_min_compile_time_secs"


@contextmanager
def unkept() -> Iterator[None]:
    """Programs that are compiled inside are not written to the cache.

    Those that call oneDNN can't be: XLA has no form for it, and fails with `std::bad_alloc`.
    """
    before = jax.config.values[_SHORTEST_S]
    jax.config.update(_SHORTEST_S, float("inf"))
    try:
        yield
    finally:
        jax.config.update(_SHORTEST_S, before)
