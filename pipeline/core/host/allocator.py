"""Allocator settings: keep freed memory for large arrays, and use huge pages.

XLA allocates the memory of a program at every dispatch, a gigabyte for a step of ResNet-18, and
frees it again. The C library passes all of that on to the kernel, which clears 300,000 pages of
4 kB each time: a quarter of the step. glibc reads its tunables before a process starts (its manual,
"Memory Allocation Tunables"), so a process without them restarts itself with them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress

VARIABLE = "GLIBC_TUNABLES"
TUNABLES: Mapping[str, int] = {
    "glibc.malloc.hugetlb": 1,  # request huge pages where the kernel leaves the choice to programs
    "glibc.malloc.mmap_max": 0,  # no separate mapping for large arrays, which free() unmaps
    "glibc.malloc.trim_threshold": 1 << 40,  # keep free memory at the end of the heap
    "glibc.malloc.arena_max": 1,  # the arenas of threads have no room for large arrays
}
SETTINGS: Mapping[str, str] = {
    VARIABLE: ":".join(f"{name}={value}" for name, value in TUNABLES.items())
}
"""Variables to add to the environment."""


def reexec_with_malloc_tunables() -> None:
    """Restart this process, with the same arguments, under an allocator that keeps memory.

    Only once, only with glibc, and not where the user has set tunables. If the system refuses, the
    process goes on without them.
    """
    if VARIABLE not in os.environ and sys.executable and _is_glibc():
        with suppress(OSError):
            os.execve(sys.executable, sys.orig_argv, {**os.environ, **SETTINGS})


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):
        return False
