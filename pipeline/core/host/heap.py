"""Free memory of this process, returned to the system when memory is short.

With the tunables of `process_start`, glibc keeps the memory that XLA frees after a dispatch. Small
arrays then take a place in it, and the next dispatch finds no room there. So the heap grows to two
to four times the memory of the program.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from math import inf

from pipeline.core.host.memory import read_available_bytes, read_process_memory

PERIOD_S = 0.2
"""Least time between two checks."""
MARGIN = 1.25
"""Least available memory, as a multiple of the largest growth."""
FREEING_S = 0.01
"""Time in which a thread of XLA frees a dispatch's memory, after the results are there."""


def return_free_pages() -> None:
    """Return free pages of the heap to the system (malloc_trim(3)).

    Using them again takes 0.2 s for a GB, and 4 s on a virtual machine whose host takes free pages.
    """
    time.sleep(FREEING_S)
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def read_resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system doesn't have /proc."""
    with suppress(OSError):
        return read_process_memory().resident_bytes
    return 0


class HeapTrimmer:
    """Returns free pages when the heap might grow by more memory than is available."""

    def __init__(self) -> None:
        self._resident_bytes = read_resident_bytes()
        """Resident memory at the last check."""
        self._limit_bytes: float | None = self._resident_bytes
        """Resident memory beyond which the heap has grown; None until the check after pages were
        returned."""
        self._largest_growth_bytes = 0
        """The largest growth from one check to the next."""
        self._checked_at_s = -inf

    def trim(self) -> None:
        """Return free pages if the heap has grown and wouldn't fit after another growth as large as
        the largest one. Checked at most every `PERIOD_S`.

        The memory that a program takes again after its pages were returned isn't growth.
        """
        now_s = time.monotonic()
        if now_s - self._checked_at_s < PERIOD_S:
            return
        self._checked_at_s = now_s
        resident_bytes = read_resident_bytes()
        growth_bytes = resident_bytes - self._resident_bytes
        self._resident_bytes = resident_bytes
        self._largest_growth_bytes = max(self._largest_growth_bytes, growth_bytes)
        if self._limit_bytes is None:
            self._limit_bytes = resident_bytes + self._largest_growth_bytes / 2
        has_grown = growth_bytes > 0 and resident_bytes > self._limit_bytes
        # Reading the available memory takes a millisecond.
        if has_grown and read_available_bytes() < MARGIN * self._largest_growth_bytes:
            return_free_pages()
            self._resident_bytes = read_resident_bytes()
            self._limit_bytes = None
