"""The number of threads that read at once."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from pipeline.backends.loading import loader
from pipeline.backends.loading.loader import TRIALS_BEFORE_RETRY, ReadingThreads

PART_S = 0.5
"""Seconds that a thread reads at once, many times the length of a trial: an ordinary part of a
window of photographs."""


class _Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=clock))
    return clock


def _trial(gate: ReadingThreads, clock: _Clock, rates: dict[int, float]) -> int:
    """Read for the length of a trial at the rate of the number that is in effect, with all."""
    number = gate.limit
    with ExitStack() as reads:
        for _ in range(number):
            reads.enter_context(gate.limit_readers(round(rates[number] * PART_S / number)))
        clock.now += PART_S
    return number


def test_thread_counts_are_tried_and_the_fastest_is_used(clock: _Clock) -> None:
    rates = {8: 500.0, 4: 700.0, 2: 1000.0, 1: 900.0}
    gate = ReadingThreads(8)
    assert [_trial(gate, clock, rates) for _ in range(6)] == [8, 4, 2, 1, 2, 2]


def test_overlapping_trials_do_not_distort_the_thread_count(clock: _Clock) -> None:
    """Each thread reads 200 samples a second, whatever the number; parts overlap trials."""
    gate = ReadingThreads(8)
    reads: list[tuple[float, ExitStack]] = []
    for _ in range(400):
        while len(reads) < gate.limit:
            read = ExitStack()
            read.enter_context(gate.limit_readers(100))
            reads.append((clock.now + PART_S + 0.01 * len(reads), read))
        reads.sort(key=lambda one: one[0])
        clock.now, read = reads.pop(0)
        read.close()
    assert gate.limit == 8


def test_thread_counts_are_tried_again_later(clock: _Clock) -> None:
    rates = {2: 1000.0, 1: 900.0}
    gate = ReadingThreads(2)
    assert [_trial(gate, clock, rates) for _ in range(3)] == [2, 1, 2]
    rates[1] = 2000.0
    later = [_trial(gate, clock, rates) for _ in range(2 * TRIALS_BEFORE_RETRY)]
    assert later[-TRIALS_BEFORE_RETRY // 2 :] == [1] * (TRIALS_BEFORE_RETRY // 2)


def test_concurrent_reads_are_limited() -> None:
    gate, entered = ReadingThreads(1), threading.Event()
    with gate.limit_readers(1):
        other = threading.Thread(target=lambda: _enter(gate, entered), daemon=True)
        other.start()
        assert not entered.wait(0.05)
    assert entered.wait(30)
    other.join()


def _enter(gate: ReadingThreads, entered: threading.Event) -> None:
    with gate.limit_readers(1):
        entered.set()
