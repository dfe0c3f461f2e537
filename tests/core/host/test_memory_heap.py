"""Free memory goes back to the system when memory is short."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from pipeline.core.host import memory
from pipeline.core.host.memory import PERIOD_S, HeapTrimmer
from pipeline.core.host.process_start import SETTINGS

PROGRAM = """
import ctypes
import resource
from pipeline.core.host.memory import return_free_pages

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
SIZE = 50_000_000

def read_resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def dispatch():
    block = libc.malloc(SIZE)
    ctypes.memset(block, 1, SIZE)
    libc.malloc(1_000_000)  # a result, so the freed block isn't at the end of the heap
    libc.free(block)
    libc.malloc(1_000_000)  # an array that takes a place in the freed block

before = read_resident_bytes()
for _ in range(3):
    dispatch()
kept = read_resident_bytes() - before
return_free_pages()
print(kept / SIZE, (read_resident_bytes() - before) / SIZE)
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="the heap is glibc's")
def test_pages_that_the_heap_keeps_are_returned() -> None:
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **SETTINGS},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    kept_blocks, left_blocks = map(float, output)
    assert kept_blocks > 1.5
    assert left_blocks < 0.2


class Machine:
    """A machine of 8 GB with one process, in place of the system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.resident_bytes = 0
        self.peaks: list[int] = []
        """Resident memory before each return of pages."""
        self.read_at_s: list[float] = []
        monkeypatch.setattr(memory.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(memory, "return_free_pages", self._return_pages)
        monkeypatch.setattr(memory, "read_resident_bytes", self._read_resident_bytes)
        monkeypatch.setattr(
            memory, "read_available_bytes", lambda: 8_000_000_000 - self.resident_bytes
        )

    def _return_pages(self) -> None:
        self.peaks.append(self.resident_bytes)
        self.resident_bytes = 500_000_000

    def _read_resident_bytes(self) -> int:
        self.read_at_s.append(self.now_s)
        return self.resident_bytes


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_pages_are_returned_before_the_memory_ends(machine: Machine) -> None:
    """A heap grows by 1 GB in each dispatch."""
    trimmer = HeapTrimmer()
    for _ in range(24):
        machine.resident_bytes += 1_000_000_000
        machine.now_s += 1
        trimmer.trim()
    assert machine.peaks == [7_000_000_000, 7_500_000_000, 7_500_000_000]


def test_program_that_reuses_its_pages_is_trimmed_once(machine: Machine) -> None:
    """A program needs 4 GB in each dispatch, and leaves them in the heap."""
    machine.resident_bytes = 500_000_000
    trimmer = HeapTrimmer()
    for index in range(100):
        machine.resident_bytes = 4_500_000_000 + 4096 * index
        machine.now_s += 1
        trimmer.trim()
    assert len(machine.peaks) == 1


def test_memory_is_checked_at_most_once_a_period(machine: Machine) -> None:
    trimmer = HeapTrimmer()
    for _ in range(100):
        trimmer.trim()
        machine.now_s += PERIOD_S / 10.5
    gaps_s = np.diff(machine.read_at_s[1:])
    assert len(gaps_s) == 9
    assert gaps_s.min() >= PERIOD_S
