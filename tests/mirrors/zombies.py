"""Two processes at one mirror, the first of which goes on after the second has begun."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.core.errors import PipelineError
from tests.mirrors.memory_store import FAULTS, KilledError, MemoryStore, Process
from tests.mirrors.runs import OTHER, RUN, Law, Life, make_folders

FIRST_STEPS = (10, 20)
NEXT_STEPS = (20, 30)
KILL = "kill"
LAND = 2
"""Instead of a process' number: the operations under way are done."""


@dataclass(frozen=True)
class Outcome:
    """What came of one interleaving."""

    operation: str
    """The operation before which the first process stopped."""
    checks: int
    """How often the law was checked."""
    loss: str | None


def replace_process(stop: int, fault: str, successor_steps: int) -> Outcome | None:
    """Let a process stop before its operation number `stop`, a second one restore the mirror and
    copy so many checkpoints, and then the first one go on to its end, with a fault.

    The law is checked after every operation. Returns None if the first process has fewer
    operations.
    """
    store = MemoryStore()
    with make_folders("first", "second") as folders:
        first = Life("first", folders["first"], FIRST_STEPS)
        process = Process(store, first.work)
        for _ in range(stop):
            process.step()
        if process.is_done:
            return None
        operation = process.next
        if fault == "late":
            process.step(fault)
        second = Life("second", folders["second"], NEXT_STEPS[:successor_steps], restores=True)
        successor = Process(store, second.work)
        successor.finish()
        _require_expected(successor)
        law = Law(store, [first, second])
        law.check()
        if fault != "late":
            process.step(fault)
        while not process.is_done:
            law.check()
            process.step()
        law.check()
        store.land()
        law.check()
        _require_expected(process)
        return Outcome(operation, law.checks, law.loss)


def run_interleaved(choices: Sequence[tuple[int, str]], *, same_run: bool) -> Outcome:
    """Let two processes take turns: each choice is the number of one, and a fault.

    The second one restores the mirror if it is of the same run. Both go on to their ends after the
    choices. The law is checked after every operation.
    """
    store = MemoryStore()
    with make_folders("first", "second") as folders:
        first = Life("first", folders["first"], FIRST_STEPS)
        run = RUN if same_run else OTHER
        second = Life("second", folders["second"], NEXT_STEPS, run, restores=same_run)
        law = Law(store, [first, second])
        processes = [Process(store, first.work)]

        def turn(number: int, fault: str) -> None:
            if number == LAND:
                store.land()
            elif number == 1 and len(processes) == 1:
                processes.append(Process(store, second.work))
            else:
                process = processes[number]
                process.kill() if fault == KILL else process.step(fault)
            law.check()

        for number, fault in choices:
            turn(number, fault)
        for number in (1, 1, 0):
            while len(processes) <= number or not processes[number].is_done:
                turn(number, "none")
        turn(LAND, "none")
        for process in processes:
            _require_expected(process)
        return Outcome("", law.checks, law.loss)


def draw_choices(draws: random.Random) -> list[tuple[int, str]]:
    """Return random choices for `run_interleaved`: long turns, few faults, rarely a kill."""
    choices: list[tuple[int, str]] = []
    for _ in range(draws.randint(1, 12)):
        number = draws.choice((0, 0, 0, 1, 1, 1, LAND))
        choices += [(number, "none")] * draws.randint(1, 20)
        if draws.random() < 0.5:
            choices.append((number, draws.choice((*FAULTS, KILL))))
    return choices


def list_outcomes(faults: Sequence[str]) -> Iterator[Outcome]:
    """Yield the outcome of each fault at each operation."""
    for fault in faults:
        for successor_steps in (1, 2):
            stop = 0
            while (outcome := replace_process(stop, fault, successor_steps)) is not None:
                yield outcome
                stop += 1


def _require_expected(process: Process) -> None:
    """Raise the error of a process, except for those that end a copy with a message."""
    if not isinstance(process.error, PipelineError | KilledError | None):
        raise process.error
