"""`python -m tests.mirrors [--interleavings N] [--seed N] [--faults]`: mirrors lose nothing.

A process that was replaced goes on at each of its operations, with each fault; two processes take
turns at random; and mirrors with a fault are restored. A table has what was tried and lost.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.core.files import storage
from tests.mirrors.faulty_mirrors import list_faults, restore_faulty
from tests.mirrors.memory_store import FAULTS
from tests.mirrors.zombies import draw_choices, list_outcomes, run_interleaved


@dataclass
class Row:
    """A row of the table."""

    name: str
    cases: int = 0
    checks: int = 0
    lost: list[str] = field(default_factory=list)


def try_zombies() -> Iterator[Row]:
    """Yield a row for each fault of a process that was replaced."""
    for fault in FAULTS:
        row = Row(f"replaced at each operation, fault: {fault}")
        for outcome in list_outcomes([fault]):
            row.cases += 1
            row.checks += outcome.checks
            if outcome.loss is not None:
                row.lost.append(f"{fault}: {outcome.operation}: {outcome.loss}")
        yield row


def try_interleavings(count: int, seed: int) -> Iterator[Row]:
    """Yield a row for two processes of one run, and of two runs, that take turns at random."""
    for same_run, name in ((True, "two processes of one run"), (False, "two runs at one address")):
        row = Row(f"{name}, random turns and faults")
        for number in range(count):
            choices = draw_choices(random.Random(f"{seed} {number}"))
            outcome = run_interleaved(choices, same_run=same_run)
            row.cases += 1
            row.checks += outcome.checks
            if outcome.loss is not None:
                row.lost.append(f"{name}, seed {seed}, number {number}: {outcome.loss}")
        yield row


def try_faults(print_result: Callable[[str], None]) -> Iterator[Row]:
    """Yield a row for faulty mirrors in a local folder."""
    row = Row("faulty mirrors: files, kinds, names, values")
    for fault in list_faults():
        result = restore_faulty(fault)
        print_result(f"{result.wrong or 'right':24} {fault.text:70} {result.result}")
        row.cases += 1
        row.checks += 1
        if result.wrong is not None:
            row.lost.append(f"{fault.text}: {result.wrong}: {result.result}")
    yield row


def main() -> int:
    """Print the table; return 1 if anything is lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.mirrors", description=__doc__)
    parser.add_argument("--interleavings", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", action="store_true", help="print what came of each fault")
    options = parser.parse_args()
    storage.WAITS_S = (0.0, 0.0, 0.0)
    os.fsync = lambda fd: None  # nothing here cuts the power
    if Path("/dev/shm").is_dir():
        tempfile.tempdir = "/dev/shm"
    start_s = time.monotonic()
    rows = [*try_zombies(), *try_interleavings(options.interleavings, options.seed)]
    rows += try_faults(print if options.faults else lambda _: None)
    print("| | cases | restorations | lost |\n| --- | ---: | ---: | ---: |")
    for row in rows:
        print(f"| {row.name} | {row.cases:,} | {row.checks:,} | {len(row.lost)} |")
    lost = [line for row in rows for line in row.lost]
    print("\n".join([f"{time.monotonic() - start_s:.0f} s", *lost]))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
