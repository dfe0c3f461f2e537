"""Cases spread over processes, each of which is watched: one that dies or hangs is replaced."""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random

from tests.fuzz.outcomes import Judged, judge

MEMORY_BYTES = 12 * 2**30
"""Of addresses a process may have; XLA takes some gigabytes without using them."""
PATIENCE = 10
"""So many times its processor time a case may take by the clock, where it can't be interrupted."""


@dataclass(frozen=True)
class Case:
    """One case: everything in it follows from these."""

    seed: int
    number: int
    kind: str

    def random(self) -> Random:
        """Its own generator."""
        return Random(f"{self.seed} {self.number} {self.kind}")


def run_cases(cases: Sequence[Case], processes: int) -> Iterator[tuple[Case, Judged]]:
    """Every case with its outcome, in the order in which they end."""
    waiting = list(reversed(cases))
    workers = [_Worker() for _ in range(min(processes, len(cases)))]
    for worker in workers:
        worker.give(waiting.pop())
    while any(worker.case for worker in workers):
        wait([worker.pipe for worker in workers if worker.case], timeout=1.0)
        for worker in workers:
            judged = worker.result()
            if worker.case is None or judged is None:
                continue
            yield worker.case, judged
            worker.case = None
            if waiting:
                worker.give(waiting.pop())
    for worker in workers:
        worker.end()


class _Worker:
    """A process and the case that it is at."""

    def __init__(self) -> None:
        self.case: Case | None = None
        self._since_s = 0.0
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self.pipe.recv()

    def give(self, case: Case) -> None:
        """Have a case carried out."""
        self.case, self._since_s = case, time.monotonic()
        self.pipe.send(case)

    def result(self) -> Judged | None:
        """The outcome of the case, None while it goes on."""
        if self.case is None:
            return None
        if self.pipe.poll():
            try:
                return self.pipe.recv()
            except EOFError:
                self._process.join()
                died = Judged("traceback", f"the process died: {self._process.exitcode}")
                self._start()
                return died
        from tests.fuzz.kinds import KINDS

        if time.monotonic() - self._since_s > PATIENCE * KINDS[self.case.kind].timeout_s:
            self._process.kill()
            self._process.join()
            self._start()
            return Judged("hang", "in code that can't be interrupted")
        return None

    def end(self) -> None:
        """Let the process end."""
        self.pipe.close()
        self._process.join(10)
        self._process.kill()


def _work(pipe: Connection) -> None:
    """Carry out case after case until nobody asks any more."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from tests.fuzz.recipe_kinds import prepare

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    prepare()
    pipe.send(None)
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        pipe.send(run_case(case))


def run_case(case: Case) -> Judged:
    """Carry out one case, in a folder of its own that is gone afterwards."""
    from tests.fuzz.kinds import KINDS

    kind = KINDS[case.kind]
    home = os.getcwd()
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    try:
        return judge(kind.act, case.random(), folder, kind.timeout_s)
    finally:
        os.chdir(home)
        shutil.rmtree(folder, ignore_errors=True)
