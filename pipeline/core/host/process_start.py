"""The first settings of a process, and requirements of every command.

Settings are standard streams, the allocator and garbage collection. Required are a working folder,
a valid clock, asserts, and valid flags of XLA.

XLA allocates and frees the memory of a program at every dispatch, a gigabyte for a step of
ResNet-18. The C library returns it to the kernel, which then clears 300,000 pages of 4 kB in every
step. This takes a quarter of the step. glibc's tunables prevent it, but must be in the environment
when a process starts ("Memory Allocation Tunables" in glibc's manual).

Requirements are checked before anything is written. The check is fast unless XLA_FLAGS is set.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

from pipeline.core.errors import RunError

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
FLAGS = "XLA_FLAGS"
DAY_S = 24 * 3600
_PARSE_FLAGS = "from jaxlib import xla_client; xla_client.CompileOptions()"
"""A program that parses the flags as XLA does, without opening a device."""


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


def require_usable_environment() -> None:
    """Raise RunError if a run can't work in this process, whatever its recipe is."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise RunError(
            "the working folder has been removed; change to one that exists, cd DIR"
        ) from error
    require_usable_clock()
    if sys.flags.optimize:
        raise RunError(
            f"PYTHONOPTIMIZE = {sys.flags.optimize}, or python -O: removes asserts, without which "
            "Hydra can't parse overrides; unset it"
        )
    offset_s = time.localtime().tm_gmtoff
    if abs(offset_s) >= DAY_S:
        raise RunError(
            f"TZ = {os.environ.get('TZ')}: is {offset_s / 3600:+g} hours from UTC; must be less "
            "than 24, as in TZ=Europe/Berlin"
        )


def require_usable_clock() -> None:
    """Raise RunError if the system clock shows a time that files can't have."""
    try:
        is_before_1970 = time.time() < 0.0
    except (OverflowError, ValueError) as error:
        raise RunError(
            "the system clock is too far from the present: Python counts from 1677 to 2262; set it"
        ) from error
    if is_before_1970:
        shown = time.strftime("%Y-%m-%d", time.gmtime())
        raise RunError(
            f"the system clock shows {shown}: files of checkpoints have times from 1970 on; set it"
        )


def require_known_flags() -> None:
    """Raise RunError for a wrong flag in XLA_FLAGS, at which XLA would abort this process."""
    if FLAGS in os.environ:
        _require_flags(os.environ[FLAGS])


@cache
def _require_flags(flags: str) -> None:
    """Raise RunError if another process, which parses the flags by XLA, fails."""
    # Imported here: few runs need it.
    import subprocess

    process = subprocess.run(
        [sys.executable, "-c", _PARSE_FLAGS], stdin=subprocess.DEVNULL, capture_output=True
    )
    if process.returncode == 0:
        return
    lines = process.stderr.decode(errors="replace").splitlines()
    # XLA logs lines such as `E1125 05:02:16.4 29408 flags.cc:93] Can't interpret ...`.
    reason = next((line.partition("] ")[2] for line in lines if "] " in line), "")
    raise RunError(f"{FLAGS} = {flags}: XLA refuses it{': ' if reason else ''}{reason}")
