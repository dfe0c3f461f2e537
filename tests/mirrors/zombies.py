"""Two processes at one mirror, the first of which goes on after the second has begun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.core.errors import PipelineError
from tests.mirrors.memory_store import FAULTS, MemoryStore, Process
from tests.mirrors.runs import OTHER, RUN, Life, find_loss, make_folders

FIRST_STEPS = (10, 20, 30)
NEXT_STEPS = (20, 30, 40)


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
        lives = [first, second]
        successor = Process(store, second.work)
        successor.finish()
        _require_expected(successor)
        checks = 1
        loss = find_loss(store, lives)
        if fault != "late":
            process.step(fault)
        while loss is None and not process.is_done:
            loss = find_loss(store, lives)
            checks += 1
            process.step()
        store.land()
        _require_expected(process)
        return Outcome(operation, checks + 1, loss or find_loss(store, lives))


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
        lives = [first, second]
        processes = [Process(store, first.work)]
        loss = None
        checks = 0

        def turn(number: int, fault: str) -> None:
            nonlocal loss, checks
            if number == 2:
                store.land()
            elif number == 1 and len(processes) == 1:
                processes.append(Process(store, second.work))
            else:
                processes[number].step(fault)
            checks += 1
            # Until the second one makes its folder, the first one isn't replaced.
            loss = loss or find_loss(store, _order_by_folder(store, lives))

        for number, fault in choices:
            turn(number, fault)
        for number in (1, 1, 0):
            while len(processes) <= number or not processes[number].is_done:
                turn(number, "none")
        turn(2, "none")
        for process in processes:
            _require_expected(process)
        return Outcome("", checks, loss)


def _order_by_folder(store: MemoryStore, lives: Sequence[Life]) -> list[Life]:
    """Return lives in the order of their folders; one without a folder has copied nothing."""
    return sorted(lives, key=lambda life: life.generation)


def list_outcomes() -> Iterator[tuple[str, int, Outcome]]:
    """Yield the outcome of each fault at each operation."""
    for fault in FAULTS:
        for successor_steps in (2, 3):
            stop = 0
            while (outcome := replace_process(stop, fault, successor_steps)) is not None:
                yield fault, successor_steps, outcome
                stop += 1


def _require_expected(process: Process) -> None:
    """Raise the error of a process, except for those that end a copy with a message."""
    if process.error is not None and not isinstance(process.error, PipelineError):
        raise process.error
