"""`python -m tests.fuzz --cases 20000`: hostile input of every kind, and what became of it.

Exit status: 0 where every case ended in success or in one clear message, else 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.fuzz.kinds import KINDS, shares
from tests.fuzz.outcomes import DEFECTS, OUTCOMES
from tests.fuzz.workers import Case, run_case, run_cases

Counts = Mapping[str, Counter[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that the arguments ask for and print the table of outcomes."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", choices=sorted(KINDS), default=sorted(KINDS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--case", type=int, help="only this case, in this process")
    asked = parser.parse_args(arguments)
    cases = plan(asked.cases, asked.seed, asked.kinds)
    if asked.case is not None:
        judged = run_case(cases[asked.case])
        print(cases[asked.case], judged.outcome, judged.detail, sep="\n")
        return int(judged.outcome in DEFECTS)
    begun = time.monotonic()
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in asked.kinds}
    try:
        for case, judged in run_cases(cases, asked.processes):
            counts[case.kind][judged.outcome] += 1
            if judged.outcome in DEFECTS:
                print(f"\n{judged.outcome}: {case}\n{judged.detail}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted; the table has the cases that had ended")
    print(table(counts))
    print(f"seed {asked.seed}, {time.monotonic() - begun:,.0f} s in {asked.processes} processes")
    return int(any(counts[kind][outcome] for kind in counts for outcome in DEFECTS))


def plan(cases: int, seed: int, kinds: Sequence[str]) -> list[Case]:
    """So many cases, spread over the kinds by their shares; the first of each comes first."""
    counts = shares(cases, kinds)
    drawn = [(number / counts[kind], kind) for kind in kinds for number in range(counts[kind])]
    return [Case(seed, number, kind) for number, (_, kind) in enumerate(sorted(drawn))]


def table(counts: Counts) -> str:
    """Counts by kind and outcome in Markdown, with sums."""
    total: Counter[str] = Counter()
    rows = []
    for kind, found in counts.items():
        total.update(found)
        rows.append(_row(kind, found))
    head = ["| kind | cases |", *(f" {outcome} |" for outcome in OUTCOMES)]
    rule = ["| --- |", " ---: |" * (len(OUTCOMES) + 1)]
    return "\n".join(["".join(head), "".join(rule), *rows, _row("all", total)])


def _row(kind: str, found: Counter[str]) -> str:
    cells = [sum(found.values()), *(found[outcome] for outcome in OUTCOMES)]
    return f"| {kind} | {' | '.join(f'{cell:,}' for cell in cells)} |"


if __name__ == "__main__":
    sys.exit(main())
