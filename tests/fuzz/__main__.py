"""Try hostile input of every kind and count the outcomes.

    python -m tests.fuzz --cases 20000

The exit status is 0 if every case ended in success or in one clear message, else 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.fuzz.kinds import KINDS, split_cases
from tests.fuzz.outcomes import DEFECTS, OUTCOMES
from tests.fuzz.workers import Case, run_case, run_cases

Counts = Mapping[str, Counter[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and print the table of outcomes."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", choices=sorted(KINDS), default=sorted(KINDS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--case", type=int, help="only this case, in this process")
    options = parser.parse_args(arguments)
    cases = plan_cases(options.cases, options.seed, options.kinds)
    if options.case is not None:
        judged = run_case(cases[options.case])
        print(cases[options.case], judged.outcome, judged.detail, sep="\n")
        return int(judged.outcome in DEFECTS)
    start_s = time.monotonic()
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in options.kinds}
    try:
        for case, judged in run_cases(cases, options.processes):
            counts[case.kind][judged.outcome] += 1
            if judged.outcome in DEFECTS:
                print(f"\n{judged.outcome}: {case}\n{judged.detail}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted; the table has the cases that had ended")
    print(format_table(counts))
    seconds = time.monotonic() - start_s
    print(f"seed {options.seed}, {seconds:,.0f} s in {options.processes} processes")
    return int(any(counts[kind][outcome] for kind in counts for outcome in DEFECTS))


def plan_cases(cases: int, seed: int, kinds: Sequence[str]) -> list[Case]:
    """Return `cases` cases, spread over the kinds by their weights; the first of each is early."""
    counts = split_cases(cases, kinds)
    places = [(number / counts[kind], kind) for kind in kinds for number in range(counts[kind])]
    return [Case(seed, number, kind) for number, (_, kind) in enumerate(sorted(places))]


def format_table(counts: Counts) -> str:
    """Return the counts by kind and outcome in Markdown, with sums."""
    total: Counter[str] = Counter()
    rows = []
    for kind, outcomes in counts.items():
        total.update(outcomes)
        rows.append(_format_row(kind, outcomes))
    head = ["| kind | cases |", *(f" {outcome} |" for outcome in OUTCOMES)]
    rule = ["| --- |", " ---: |" * (len(OUTCOMES) + 1)]
    return "\n".join(["".join(head), "".join(rule), *rows, _format_row("all", total)])


def _format_row(kind: str, counts: Counter[str]) -> str:
    cells = [counts.total(), *(counts[outcome] for outcome in OUTCOMES)]
    return f"| {kind} | {' | '.join(f'{cell:,}' for cell in cells)} |"


if __name__ == "__main__":
    sys.exit(main())
