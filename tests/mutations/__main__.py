"""Break each feature of docs/requirements.md by one line: does the test of its row fail?

    python -m tests.mutations [CODE ...] [--jobs 1]

Runs the tests in a copy of the project, first without a mutation. Then for each row one mutation of
mutations.toml is applied and the row's test runs. The exit status is 1 if a test fails without a
mutation, passes with it, or if a mutation doesn't apply. `--logs FOLDER` keeps what pytest prints.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.mutations.mutations import Mutation, read_mutations
from tests.mutations.sandbox import Outcome, Sandbox, import_libraries
from tests.requirement_rows import ROOT, ROWS

POLL_SECONDS = 0.02
NO_OUTCOME = Outcome()
CAUGHT = "caught"
STOPPED = 128 + signal.SIGTERM
Task = TypeVar("Task")


@dataclass(frozen=True)
class MutatedRow:
    """A row of the table: its test, as `FILE::FUNCTION`, and its mutation, None without one."""

    code: str
    test: str
    mutation: Mutation | None


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


def start_mutated(sandbox: Sandbox, row: MutatedRow, stack: ExitStack) -> None:
    """Run the test of a row with its mutation."""
    assert row.mutation is not None
    stack.enter_context(sandbox.mutate(row.mutation))
    sandbox.start([row.test])


def find_obstacle(row: MutatedRow, passing: Collection[str]) -> str | None:
    """Return the verdict on a row whose mutation can't be judged; None if it can be."""
    if row.mutation is None:
        return "no mutation"
    try:
        row.mutation.apply_to((ROOT / row.mutation.file).read_text())
    except (OSError, ValueError):
        return "not applicable"
    return None if row.test in passing else "fails without it"


def judge(test: str, outcome: Outcome) -> str:
    """Name the verdict on a mutation by the outcome of its test."""
    if outcome.is_timed_out:
        return "hangs"
    if test in outcome.failed:
        return CAUGHT
    return "survived" if test in outcome.passed else "not run"


def iterate_verdicts(
    sandboxes: Sequence[Sandbox], rows: Sequence[MutatedRow], *, mutated_only: bool
) -> Iterator[tuple[str, str, Outcome]]:
    """Yield a name, a verdict and an outcome of the unmutated tests, then of each row."""
    tests = sorted({row.test for row in rows})
    passing = set(tests) if mutated_only else set[str]()
    shares = [] if mutated_only else [tests[i :: len(sandboxes)] for i in range(len(sandboxes))]
    for share, outcome in run_tasks(sandboxes, list(filter(None, shares)), start_unmutated):
        passing |= outcome.passed - outcome.failed
        good = len(passing & set(share))
        yield f"unmutated_{shares.index(share)}", f"{good} of {len(share)} tests pass", outcome
    obstacles = {row.code: find_obstacle(row, passing) for row in rows}
    for code, obstacle in obstacles.items():
        if obstacle is not None:
            yield code, obstacle, NO_OUTCOME
    judged = [row for row in rows if obstacles[row.code] is None]
    for row, outcome in run_tasks(sandboxes, judged, start_mutated):
        yield row.code, judge(row.test, outcome), outcome


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with 2 for unknown codes."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("codes", nargs="*", metavar="CODE", help="rows; all without")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--mutated-only", action="store_true", help="trust the unmutated tests")
    parser.add_argument("--logs", type=Path, help="folder for the output of pytest")
    options = parser.parse_args(arguments)
    codes = [row.code for row in ROWS]
    if unknown := sorted(set(options.codes) - set(codes)):
        parser.error(f"there is no row {', '.join(unknown)} in docs/requirements.md")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: must be at least 1")
    options.codes = options.codes or codes
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the mutations and return the exit status."""
    options = parse_arguments(arguments)
    mutations = read_mutations()
    tests = {row.code: row.test.strip("`") for row in ROWS}
    rows = [MutatedRow(code, tests[code], mutations.get(code)) for code in options.codes]
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    import_libraries()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # removes the copies
    caught = 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sandboxes = [Sandbox(Path(folder) / str(i)) for i in range(options.jobs)]
        for sandbox in sandboxes:
            stack.callback(sandbox.close)
        verdicts = iterate_verdicts(sandboxes, rows, mutated_only=options.mutated_only)
        for name, verdict, outcome in verdicts:
            caught += verdict == CAUGHT
            breaks = mutations[name].breaks if name in mutations else "without a mutation"
            print(f"{name:4}  {verdict:16}  {outcome.seconds:6.1f} s  {breaks}", flush=True)
            if options.logs:
                (options.logs / f"{name}.log").write_text(outcome.output)
    print(f"{caught} of {len(rows)} caught")
    return int(caught < len(rows))


if __name__ == "__main__":
    sys.exit(main())
