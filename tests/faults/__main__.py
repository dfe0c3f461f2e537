"""`python -m tests.faults --all`: let file operations of a run fail, each in its turn, and judge.

A library that is preloaded counts the calls below one folder of a run, by kind, and lets one of
them fail with an errno, or it and all after it; or gives half of what was to be read or written. A
run must then be done with all that it should have saved, or end with a message, and go on from
what it has saved to the same end, bit for bit. Of the first scenario every call of every kind fails
once with `--all`, some 1,400; of the others, of faults that last, and without `--all`, those that
are evenly spread. Every case that fails is resumed without the fault.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from tests.faults.faults import LASTING, Fault, calls_of, faults_of, names
from tests.faults.judging import DEFECTS, Verdict, try_case
from tests.faults.preload import compile_library, reason_to_skip
from tests.faults.runs import Nursery
from tests.faults.scenarios import SCENARIOS, Prepared, prepare

MOST = 40
"""Calls of a kind that fail in scenarios after the first, and of those after which all do."""
FEW = 12
"""Calls of each name and scenario that fail without `--all`."""
AT_ONCE = 2


@dataclass
class Row:
    """A line of the table: the faults of a name in a scenario."""

    calls: int
    cases: int = 0
    injected: int = 0
    done: int = 0
    failed: int = 0
    defects: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: Verdict) -> None:
        """Count a case."""
        self.cases += 1
        self.injected += bool(verdict.injected)
        self.done += verdict.done
        self.failed += not verdict.done
        self.defects.update(verdict.defects)


Case = tuple[Prepared, Fault]


class Harness:
    """Scenarios in a folder of their own, and as many nurseries as run at once."""

    def __init__(self, folder: Path, at_once: int = AT_ONCE) -> None:
        self._folder, self._at_once = folder, at_once
        self._library = compile_library(folder)
        self._numbers, self._stack = count(1), ExitStack()
        self._free: SimpleQueue[Nursery | None] = SimpleQueue()
        for _ in range(at_once):
            self._free.put(None)

    def prepare(self, scenarios: Sequence[str]) -> list[Prepared]:
        """Run scenarios without faults."""
        wanted = [scenario for scenario in SCENARIOS if scenario.name in scenarios]
        with self._nursery() as nursery:
            return [prepare(scenario, self._folder, nursery) for scenario in wanted]

    def try_all(
        self, cases: Sequence[Case], kept: Path | None = None
    ) -> Iterator[tuple[Case, Verdict]]:
        """Try cases, several at once; the folders of those that are wrong are kept in `kept`."""
        with ThreadPoolExecutor(self._at_once) as pool:
            yield from zip(cases, pool.map(lambda case: self._try(case, kept), cases), strict=True)

    def _try(self, case: Case, kept: Path | None) -> Verdict:
        folder = self._folder / f"case_{next(self._numbers)}"
        folder.mkdir()
        with self._nursery() as nursery:
            verdict = try_case(*case, folder, nursery)
        if verdict.defects and kept is not None:
            shutil.move(folder, kept / folder.name)
        else:
            shutil.rmtree(folder)
        return verdict

    @contextmanager
    def _nursery(self) -> Iterator[Nursery]:
        """One that nobody uses meanwhile, made where there are too few."""
        nursery = self._free.get() or self._stack.enter_context(Nursery(self._library))
        try:
            yield nursery
        finally:
            self._free.put(nursery)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def plan(
    prepared: Sequence[Prepared], wanted: Sequence[str], most: int | None, seed: int
) -> list[Case]:
    """Return cases of the faults of the `wanted` names; `most` of each in a scenario, if given."""
    cases = []
    for number, each in enumerate(prepared):
        for name in wanted:
            spread = MOST if number or name in LASTING else None
            limit = spread if most is None else most
            cases += [(each, fault) for fault in faults_of(name, each.calls, limit, seed)]
    return cases


def main() -> int:
    """Print the table and what is wrong; 1 where anything is."""
    asked = _parser().parse_args()
    if reason := reason_to_skip():
        print(f"nothing is injected: {reason}", file=sys.stderr)
        return 0
    begun = time.monotonic()
    if asked.keep is not None:
        asked.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        harness = stack.enter_context(Harness(Path(folder).resolve(), asked.at_once))
        prepared = harness.prepare(asked.scenario or [each.name for each in SCENARIOS])
        most = None if asked.all else asked.most
        cases = plan(prepared, asked.kind or names(), most, asked.seed)
        if asked.nth:
            every = plan(prepared, asked.kind or names(), sys.maxsize, asked.seed)
            cases = [case for case in every if case[1].nth in asked.nth]
        if asked.limit is not None:
            cases = random.Random(asked.seed).sample(cases, min(asked.limit, len(cases)))
        rows = try_and_report(harness, cases, asked.keep)
    print(table(rows))
    print(f"{len(cases)} cases, seed {asked.seed}, {(time.monotonic() - begun) / 60:.1f} minutes")
    return 1 if any(row.defects for row in rows.values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every call of every kind")
    parser.add_argument("--kind", action="append", choices=names(), help="of fault; several")
    parser.add_argument("--scenario", action="append", choices=[each.name for each in SCENARIOS])
    parser.add_argument("--nth", type=int, action="append", help="this call alone; several")
    parser.add_argument("--most", type=int, default=FEW, help="calls of each kind, evenly spread")
    parser.add_argument("--limit", type=int, help="cases in all, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0, help="also decides the errno of a call")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where folders of bad cases go")
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    return parser


def try_and_report(
    harness: Harness, cases: Sequence[Case], kept: Path | None = None
) -> dict[tuple[str, str], Row]:
    """Rows of the table by scenario and name of fault; what is wrong is printed at once."""
    rows: dict[tuple[str, str], Row] = {}
    for number, ((prepared, fault), verdict) in enumerate(harness.try_all(cases, kept), start=1):
        key = prepared.scenario.name, fault.name
        rows.setdefault(key, Row(calls_of(fault.name, prepared.calls))).add(verdict)
        for defect, seen in verdict.defects.items():
            call = verdict.injected[0] if verdict.injected else "no call"
            print(f"\n{defect}: {key[0]}, {fault} ({call})\n{seen}", file=sys.stderr, flush=True)
        if number % 50 == 0:
            print(f"{number} of {len(cases)} cases", file=sys.stderr, flush=True)
    return rows


def table(rows: dict[tuple[str, str], Row]) -> str:
    """The counts by scenario and kind of fault."""
    columns = ("calls", "cases", "injected", "done", "failed", *DEFECTS)
    head = f"{'scenario':<10}{'fault':<16}" + "".join(
        f"{name:>{len(name) + 2}}" for name in columns
    )
    lines = [head]
    for (scenario, name), row in rows.items():
        counts = (row.calls, row.cases, row.injected, row.done, row.failed)
        counts += tuple(row.defects[defect] for defect in DEFECTS)
        cells = zip(columns, counts, strict=True)
        lines.append(f"{scenario:<10}{name:<16}" + "".join(f"{n:>{len(c) + 2}}" for c, n in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
