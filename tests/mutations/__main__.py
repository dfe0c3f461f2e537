"""Break each feature of docs/requirements.md by one line: does the test of its row fail?

    python -m tests.mutations [CODE ...] [--jobs 1]

Runs the tests in a copy of the project, first without a mutation. Then for each row one mutation of
mutations.toml is applied and the row's test runs. The exit status is 1 if a test fails without a
mutation, passes with it, or if a mutation doesn't apply.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from tests.mutations.mutations import Mutation, read_mutations
from tests.mutations.sandbox import Outcome, Sandbox, import_libraries
from tests.requirement_rows import ROOT, ROWS

POLL_SECONDS = 0.02
NO_OUTCOME = Outcome()
Task = TypeVar("Task")


def run_tasks(
    sandboxes: Sequence[Sandbox],
    tasks: Sequence[Task],
    start: Callable[[Sandbox, Task, ExitStack], None],
) -> Iterator[tuple[Task, Outcome]]:
    """Yield the outcomes of tasks as they end; each sandbox has one task at a time.

    `start` begins a task, and puts on the stack what is undone at its end.
    """
    waiting = list(reversed(tasks))
    running: dict[int, tuple[Task, ExitStack]] = {}
    while waiting or running:
        for i, sandbox in enumerate(sandboxes):
            if i not in running and waiting:
                running[i] = (waiting.pop(), ExitStack())
                start(sandbox, *running[i])
            if i in running and (outcome := sandbox.poll()) is not None:
                task, stack = running.pop(i)
                stack.close()
                yield task, outcome
        time.sleep(POLL_SECONDS)


def start_unmutated(sandbox: Sandbox, tests: Sequence[str], stack: ExitStack) -> None:
    """Run several tests."""
    sandbox.start(tests)


def does_apply(mutation: Mutation) -> bool:
    """Return whether the old text still occurs once, so that the mutation can be applied."""
    try:
        mutation.apply_to((ROOT / mutation.file).read_text())
    except (OSError, ValueError):
        return False
    return True


def judge(test: str, outcome: Outcome) -> str:
    """Name the verdict on a mutation by the outcome of its test."""
    if outcome.is_timed_out:
        return "hangs"
    if test in outcome.failed:
        return "caught"
    return "survived" if test in outcome.passed else "not run"


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the mutations and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("codes", nargs="*", metavar="CODE", help="rows; all without")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--mutated-only", action="store_true", help="trust the unmutated tests")
    parser.add_argument("--logs", type=Path, help="folder for the output of pytest")
    options = parser.parse_args(arguments)
    tests = {row.code: row.test.strip("`") for row in ROWS}
    if unknown := sorted(set(options.codes) - set(tests)):
        parser.error(f"unknown codes: {', '.join(unknown)}")
    codes = options.codes or list(tests)
    mutations = read_mutations()
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    import_libraries()
    verdicts: dict[str, str] = {}

    def report(code: str, verdict: str, outcome: Outcome = NO_OUTCOME) -> None:
        verdicts[code] = verdict
        breaks = mutations[code].breaks if code in mutations else ""
        print(f"{code}  {verdict:9}  {outcome.seconds:5.1f} s  {breaks}", flush=True)
        if options.logs:
            (options.logs / f"{code}.log").write_text(outcome.output)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sandboxes = [Sandbox(Path(folder) / str(i)) for i in range(options.jobs)]
        for sandbox in sandboxes:
            stack.callback(sandbox.close)
        distinct = sorted({tests[code] for code in codes})
        passing = set(distinct) if options.mutated_only else set[str]()
        shares = [distinct[i :: options.jobs] for i in range(options.jobs)]
        shares = [] if options.mutated_only else list(filter(None, shares))
        for share, outcome in run_tasks(sandboxes, shares, start_unmutated):
            passing |= outcome.passed - outcome.failed
            if options.logs:
                (options.logs / f"unmutated_{shares.index(share)}.log").write_text(outcome.output)
        if shares:
            print(f"{len(passing)} of {len(distinct)} tests pass without a mutation", flush=True)
        applicable: list[Mutation] = []
        for code in codes:
            if code not in mutations:
                report(code, "no mutation")
            elif not does_apply(mutations[code]):
                report(code, "not applicable")
            elif tests[code] not in passing:
                report(code, "fails without it")
            else:
                applicable.append(mutations[code])

        def start(sandbox: Sandbox, mutation: Mutation, stack: ExitStack) -> None:
            stack.enter_context(sandbox.mutate(mutation))
            sandbox.start([tests[mutation.code]])

        for mutation, outcome in run_tasks(sandboxes, applicable, start):
            report(mutation.code, judge(tests[mutation.code], outcome), outcome)
    caught = sum(verdict == "caught" for verdict in verdicts.values())
    print(f"{caught} of {len(codes)} caught")
    return int(caught < len(codes))


if __name__ == "__main__":
    sys.exit(main())
