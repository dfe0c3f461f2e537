"""Free memory of this process, returned to the system when memory is short.

With the tunables of `process_start`, glibc keeps the memory that XLA frees after a dispatch. Small
arrays then take a place in it, and the next dispatch finds no room there. So the heap grows to two
to four times the memory of the program.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
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


@dataclass
class HeapTrimmer:
    """Returns free pages when the heap might grow by more memory than is available."""

    return_pages: Callable[[], None] = return_free_pages
    read_resident_bytes: Callable[[], int] = read_resident_bytes
    read_available_bytes: Callable[[], int] = read_available_bytes
    read_clock_s: Callable[[], float] = time.monotonic
    resident_bytes: int = field(init=False)
    """Resident memory at the last check."""
    limit_bytes: float | None = field(init=False)
    """Resident memory beyond which the heap has grown; None until the check after pages were
    returned."""
    largest_growth_bytes: int = field(default=0, init=False)
    """The largest growth from one check to the next."""
    checked_at_s: float = field(default=-inf, init=False)

    def __post_init__(self) -> None:
        self.resident_bytes = self.read_resident_bytes()
        self.limit_bytes = self.resident_bytes

    def trim(self) -> None:
        """Return free pages if the heap has grown and wouldn't fit after another growth as large as
        the largest one. Checked at most every `PERIOD_S`.

        The memory that a program takes again after its pages were returned isn't growth.
        """
        now_s = self.read_clock_s()
        if now_s - self.checked_at_s < PERIOD_S:
            return
        self.checked_at_s = now_s
        resident_bytes = self.read_resident_bytes()
        growth_bytes = resident_bytes - self.resident_bytes
        self.resident_bytes = resident_bytes
        self.largest_growth_bytes = max(self.largest_growth_bytes, growth_bytes)
        if self.limit_bytes is None:
            self.limit_bytes = resident_bytes + self.largest_growth_bytes / 2
        has_grown = growth_bytes > 0 and resident_bytes > self.limit_bytes
        # Reading the available memory takes a millisecond.
        if has_grown and self.read_available_bytes() < MARGIN * self.largest_growth_bytes:
            self.return_pages()
            self.resident_bytes = self.read_resident_bytes()
            self.limit_bytes = None
