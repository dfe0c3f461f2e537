"""Large arrays in memory that is kept, and in huge pages.

XLA takes the memory of a program anew at every dispatch, a gigabyte for a step of ResNet-18, and
gives it back. The C library passes all of that on to the kernel, which clears 300,000 pages of 4 kB
again and again: a quarter of the step. glibc does otherwise when it is told so before a process
begins (its manual, "Memory Allocation Tunables"), so a process that was not told begins again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
TUNABLES: Mapping[str, int] = {
    "glibc.malloc.hugetlb": 1,  # ask for huge pages wherever the kernel leaves it to programs
    "glibc.malloc.mmap_max": 0,  # no mapping of its own for a large array, which is always unmapped
    "glibc.malloc.trim_threshold": 1 << 40,  # keep what is free at the end of the heap
    "glibc.malloc.arena_max": 1,  # the arenas of threads have no room for large arrays
}
SETTINGS: Mapping[str, str] = {
    VARIABLE: ":".join(f"{name}={value}" for name, value in TUNABLES.items())
}
"""What is added to the environment."""


def reexec_with_malloc_tunables() -> None:
    """Begin this process again, as it was called, with an allocator that keeps memory.

    Only once, only where the C library is glibc, and not where the user has settings for it.
    """
    if VARIABLE not in os.environ and _is_glibc():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **SETTINGS})


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):
        return False
