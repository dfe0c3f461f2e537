"""The first settings of a process: standard streams, the allocator, garbage collection.

XLA allocates and frees the memory of a program at every dispatch, a gigabyte for a step of
ResNet-18. The C library returns it to the kernel, which then clears 300,000 pages of 4 kB in every
step. This takes a quarter of the step. glibc's tunables prevent it, but must be in the environment
when a process starts ("Memory Allocation Tunables" in glibc's manual).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from contextlib import suppress

VARIABLE = "GLIBC_TUNABLES"
TUNABLES: Mapping[str, int] = {
    "glibc.malloc.hugetlb": 1,  # request huge pages if the kernel leaves the choice to programs
    "glibc.malloc.mmap_max": 0,  # no separate mapping for large arrays, which free() unmaps
    "glibc.malloc.trim_threshold": 1 << 40,  # keep free memory at the end of the heap
    "glibc.malloc.arena_max": 1,  # the arenas of threads have no room for large arrays
}
SETTINGS: Mapping[str, str] = {
    VARIABLE: ":".join(f"{name}={value}" for name, value in TUNABLES.items())
}
"""Variables that are added to the environment."""

SELDOM = 100_000
WHILE_STARTING = 2_000_000
YOUNG_COLLECTIONS = 20
OLD_COLLECTIONS = 100
"""Thresholds of `gc`: new objects (SELDOM or WHILE_STARTING) until the first generation is
collected, and collections of a generation until the second and the third one are."""


def open_closed_streams() -> None:
    """Open the null device for stdin, stdout and stderr if they are closed.

    Otherwise Python has no `sys.stdout`, and the next opened file gets its number: output of
    libraries would be written into a checkpoint.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # `open` returns the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def reexec_with_malloc_tunables() -> None:
    """Restart this process, with the same arguments, with tunables that keep freed memory.

    Does nothing if the tunables are set, by the user or by the first call, or without glibc. If the
    system refuses, the process continues without tunables.
    """
    if VARIABLE in os.environ or not sys.executable:
        return
    library = ""
    with suppress(AttributeError, ValueError, OSError):  # another C library
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""
    if library.startswith("glibc"):
        with suppress(OSError):
            os.execve(sys.executable, sys.orig_argv, {**os.environ, **SETTINGS})


def collect_less_while_starting() -> None:
    """Collect garbage rarely while imports and tracing create millions of lasting objects.

    Repeated collections took about 0.25 s of the 3 s until the first step.
    """
    gc.set_threshold(WHILE_STARTING, YOUNG_COLLECTIONS, OLD_COLLECTIONS)


def collect_seldom() -> None:
    """End the effect of `collect_less_while_starting`, if it was called.

    From now on, garbage is collected seldom, and objects that exist now are left out.
    """
    if gc.get_threshold()[0] == WHILE_STARTING:
        gc.freeze()
        gc.set_threshold(SELDOM, YOUNG_COLLECTIONS, OLD_COLLECTIONS)
