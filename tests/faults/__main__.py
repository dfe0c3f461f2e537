"""Let the file operations of a run fail, one after the other, and judge the runs.

    python -m tests.faults --all

A preloaded library counts the calls below one folder of a run, by kind. It lets one of them fail
with an errno, or it and all later ones, or it transfers only half of the bytes. The run must then
be done with everything that it should have saved, or end with a message; a failed run is resumed
without the fault and must end with the same bits. With `--all`, every call of every kind fails once
in the first scenario; in the others, for lasting faults and without `--all`, the failing calls are
evenly spread.
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

from tests.faults.faults import LASTING, Fault, count_calls, iter_faults, list_names
from tests.faults.judging import DEFECTS, Verdict, try_case
from tests.faults.preload import compile_library, explain_skip
from tests.faults.runs import Nursery
from tests.faults.scenarios import SCENARIOS, Baseline, run_baseline

MOST = 40
"""Failing calls of a kind in scenarios after the first, and of lasting faults."""
FEW = 12
"""Failing calls of each name and scenario without `--all`."""
NUM_NURSERIES = 2

SCENARIO_NAMES = tuple(scenario.name for scenario in SCENARIOS)


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


Case = tuple[Baseline, Fault]


class Harness:
    """Runs cases below a folder, on `num_nurseries` nurseries at once."""

    def __init__(self, folder: Path, num_nurseries: int = NUM_NURSERIES) -> None:
        self._folder = folder
        self._num_nurseries = num_nurseries
        self._library = compile_library(folder)
        self._numbers = count(1)
        self._stack = ExitStack()
        self._free: SimpleQueue[Nursery | None] = SimpleQueue()
        for _ in range(num_nurseries):
            self._free.put(None)

    def run_baselines(self, names: Sequence[str]) -> list[Baseline]:
        """Run scenarios without faults."""
        scenarios = [scenario for scenario in SCENARIOS if scenario.name in names]
        with self._borrow_nursery() as nursery:
            return [run_baseline(scenario, self._folder, nursery) for scenario in scenarios]

    def try_all(
        self, cases: Sequence[Case], defect_dir: Path | None = None
    ) -> Iterator[tuple[Case, Verdict]]:
        """Try cases, several at once; folders of cases with defects move to `defect_dir`."""
        with ThreadPoolExecutor(self._num_nurseries) as pool:
            verdicts = pool.map(lambda case: self._try(case, defect_dir), cases)
            yield from zip(cases, verdicts, strict=True)

    def _try(self, case: Case, defect_dir: Path | None) -> Verdict:
        folder = self._folder / f"case_{next(self._numbers)}"
        folder.mkdir()
        with self._borrow_nursery() as nursery:
            verdict = try_case(case[0], case[1], folder, nursery)
        if verdict.defects and defect_dir is not None:
            shutil.move(folder, defect_dir / folder.name)
        else:
            shutil.rmtree(folder)
        return verdict

    @contextmanager
    def _borrow_nursery(self) -> Iterator[Nursery]:
        """Take an idle nursery, or start one if there are too few."""
        nursery = self._free.get() or self._stack.enter_context(Nursery(self._library))
        try:
            yield nursery
        finally:
            self._free.put(nursery)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def plan_cases(
    baselines: Sequence[Baseline], names: Sequence[str], most: int | None, seed: int
) -> list[Case]:
    """Return cases of faults with these names; at most `most` of each in a scenario."""
    cases = []
    for number, baseline in enumerate(baselines):
        for name in names:
            spread = MOST if number or name in LASTING else None
            limit = spread if most is None else most
            faults = iter_faults(name, baseline.calls, limit, seed)
            cases += [(baseline, fault) for fault in faults]
    return cases


def main() -> int:
    """Print the table and the defects; return 1 if there is one."""
    options = _make_parser().parse_args()
    if reason := explain_skip():
        print(f"nothing is injected: {reason}", file=sys.stderr)
        return 0
    start_s = time.monotonic()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        harness = stack.enter_context(Harness(Path(folder).resolve(), options.at_once))
        baselines = harness.run_baselines(options.scenario or list(SCENARIO_NAMES))
        most = None if options.all else options.most
        if options.nth:
            most = sys.maxsize
        cases = plan_cases(baselines, options.kind or list_names(), most, options.seed)
        if options.nth:
            cases = [case for case in cases if case[1].nth in options.nth]
        if options.limit is not None:
            cases = random.Random(options.seed).sample(cases, min(options.limit, len(cases)))
        rows = try_and_report(harness, cases, options.keep)
    print(format_table(rows))
    minutes = (time.monotonic() - start_s) / 60
    print(f"{len(cases)} cases, seed {options.seed}, {minutes:.1f} minutes")
    return 1 if any(row.defects for row in rows.values()) else 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every call of every kind")
    parser.add_argument("--kind", action="append", choices=list_names(), help="of fault; several")
    parser.add_argument("--scenario", action="append", choices=SCENARIO_NAMES)
    parser.add_argument("--nth", type=int, action="append", help="only this call; several")
    parser.add_argument("--most", type=int, default=FEW, help="calls of each kind, evenly spread")
    parser.add_argument("--limit", type=int, help="cases in all, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0, help="also decides the errno of a call")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="for the folders of cases with defects"
    )
    parser.add_argument("--at-once", type=int, default=NUM_NURSERIES)
    return parser


def try_and_report(
    harness: Harness, cases: Sequence[Case], defect_dir: Path | None = None
) -> dict[tuple[str, str], Row]:
    """Return the rows by scenario and name of fault; defects are printed at once."""
    rows: dict[tuple[str, str], Row] = {}
    verdicts = harness.try_all(cases, defect_dir)
    for number, ((baseline, fault), verdict) in enumerate(verdicts, start=1):
        key = (baseline.scenario.name, fault.name)
        rows.setdefault(key, Row(count_calls(fault.name, baseline.calls))).add(verdict)
        for defect, text in verdict.defects.items():
            call = verdict.injected[0] if verdict.injected else "no call"
            print(f"\n{defect}: {key[0]}, {fault} ({call})\n{text}", file=sys.stderr, flush=True)
        if number % 50 == 0:
            print(f"{number} of {len(cases)} cases", file=sys.stderr, flush=True)
    return rows


def format_table(rows: dict[tuple[str, str], Row]) -> str:
    """Return the counts by scenario and name of a fault."""
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
