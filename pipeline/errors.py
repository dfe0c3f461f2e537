"""The errors a user is meant to read: one message, no traceback; and the exit status of all."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Literal

MAX_PROBLEMS = 50
"""Problems that a message lists; whoever made more has one cause for most of them."""
MAX_PROBLEM_LENGTH = 2_000


class PipelineError(Exception):
    """A run that could not be done; the message says what is wrong, the value and what is right."""

    exit_status = 1

    def __init__(self, message: str) -> None:
        super().__init__(printable_lines(message))


class RunError(PipelineError):
    """The recipe was right and the run failed: a device, a disk, a loss that is not finite."""


class RecipeError(PipelineError):
    """The recipe is wrong. Carries every problem found, each opening with its dotted key."""

    exit_status = 2

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(map(_in_one_line, problems))
        count = len(self.problems)
        head = "the recipe has a problem:" if count == 1 else f"the recipe has {count:,} problems:"
        super().__init__("\n".join([head, *(f"  {line}" for line in listed(self.problems))]))


class UsageError(PipelineError):
    """A command was given what it does not take; says what that was, and what it takes."""

    exit_status = 2

    def __init__(self, given: Sequence[str], takes: str) -> None:
        super().__init__(f"{' '.join(given) or 'nothing'}: {takes}")


class DataError(PipelineError):
    """Data that is missing, unreadable or not what the recipe says it is."""

    exit_status = 2


SUCCEEDED = ("done", "pruned")
"""What a run has become for good: nothing is left to do about it."""


def exit_status_of(outcome: BaseException | str) -> int:
    """The exit status that stands for an error, or for what has become of a run.

    0 for a run that has succeeded, 2 where a recipe or its data is wrong, else 1: failed, stopped.
    """
    if isinstance(outcome, PipelineError):
        return outcome.exit_status
    return 0 if outcome in SUCCEEDED else 1


def status_after(error: BaseException) -> Literal["failed", "stopped"]:
    """What a run has become that an error ended.

    An exit that was asked for, by a signal or by a scheduler, is no failure.
    """
    return "failed" if isinstance(error, Exception) else "stopped"


def first_line(error: BaseException) -> str:
    """What an error of a library says first; its type where it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def listed(problems: Sequence[str]) -> list[str]:
    """The problems that a message has room for, and how many more there are."""
    more = len(problems) - MAX_PROBLEMS
    return [*problems[:MAX_PROBLEMS], *([f"... and {more:,} more"] if more > 0 else [])]


def printable(text: str) -> str:
    """A text in which what would steer a terminal is written out: names in files may have it."""
    return text if text.isprintable() else repr(text)[1:-1]


def printable_lines(text: str) -> str:
    """The same of a text whose lines are meant."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _in_one_line(problem: str) -> str:
    """A problem as a line of a message: names in it may have newlines, and be of any length."""
    line = printable(problem)
    return line if len(line) <= MAX_PROBLEM_LENGTH else f"{line[: MAX_PROBLEM_LENGTH - 3]}..."


def report_errors(action: Callable[[], int], *, debug: bool) -> int:
    """Run an action; an error becomes one message on stderr and an exit status."""
    try:
        return action()
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        return exit_status_of(error)
    except BrokenPipeError as error:
        # Whoever read stdout has left; Python would complain once more on flushing it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_status_of(error)
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"error: {_message(error)}", file=sys.stderr)
        return exit_status_of(error)


def _message(error: Exception) -> str:
    if isinstance(error, PipelineError):
        return str(error)
    return printable_lines(f"{type(error).__name__}: {error}") + " (debug=true shows the traceback)"
