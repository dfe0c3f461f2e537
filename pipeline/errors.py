"""Errors for the user, shown as one message without a traceback, and their exit statuses."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Literal

MAX_PROBLEMS = 50
"""Limit of the problems in a message; more than that usually have one cause."""
MAX_PROBLEM_LENGTH = 2_000


class PipelineError(Exception):
    """A failed run; the message gives the problem, the value and what would be right."""

    exit_status = 1

    def __init__(self, message: str) -> None:
        super().__init__(printable_lines(message))


class RunError(PipelineError):
    """A failure with a valid recipe: a device, a disk, a loss that is not finite."""


class RecipeError(PipelineError):
    """An invalid recipe. Carries every problem found, each starting with its dotted key."""

    exit_status = 2

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(map(_in_one_line, problems))
        count = len(self.problems)
        head = "the recipe has a problem:" if count == 1 else f"the recipe has {count:,} problems:"
        super().__init__("\n".join([head, *(f"  {line}" for line in listed(self.problems))]))


class UsageError(PipelineError):
    """Invalid arguments of a command; the message has them and the command's usage."""

    exit_status = 2

    def __init__(self, given: Sequence[str], takes: str) -> None:
        super().__init__(f"{' '.join(given) or 'nothing'}: {takes}")


class DataError(PipelineError):
    """Data that is missing, unreadable or different from the recipe's description."""

    exit_status = 2


SUCCEEDED = ("done", "pruned")
"""Final statuses of a run that needs no further work."""


def exit_status_of(outcome: BaseException | str) -> int:
    """The exit status for an error, or for the status of a run.

    0 for success, 2 where a recipe or its data is wrong, else 1: failed, stopped.
    """
    if isinstance(outcome, PipelineError):
        return outcome.exit_status
    return 0 if outcome in SUCCEEDED else 1


def status_after(error: BaseException) -> Literal["failed", "stopped"]:
    """The status of a run that an error ended.

    An exit on request, by a signal or by a scheduler, is no failure.
    """
    return "failed" if isinstance(error, Exception) else "stopped"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the error's type where that is empty."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def listed(problems: Sequence[str]) -> list[str]:
    """The first MAX_PROBLEMS problems, and a line with the number of further ones."""
    more = len(problems) - MAX_PROBLEMS
    return [*problems[:MAX_PROBLEMS], *([f"... and {more:,} more"] if more > 0 else [])]


def printable(text: str) -> str:
    """A text with control characters escaped, which names in files may contain."""
    return text if text.isprintable() else repr(text)[1:-1]


def printable_lines(text: str) -> str:
    """A text of several lines with all other control characters escaped."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _in_one_line(problem: str) -> str:
    """A problem as one line of bounded length: names in it may have newlines and any length."""
    line = printable(problem)
    return line if len(line) <= MAX_PROBLEM_LENGTH else f"{line[: MAX_PROBLEM_LENGTH - 3]}..."


def report_errors(action: Callable[[], int], *, debug: bool) -> int:
    """Run an action; print an error as one message on stderr, and return the exit status.

    All output has been written then, or is discarded.
    """
    status = _run(action, debug=debug)
    try:
        sys.stdout.flush()
    except OSError as error:
        discard(sys.stdout)
        if status == 0 and not isinstance(error, BrokenPipeError):
            print(f"error: the output can't be written: {error.strerror}", file=sys.stderr)
        return status or exit_status_of(error)
    return status


def _run(action: Callable[[], int], *, debug: bool) -> int:
    try:
        return action()
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        return exit_status_of(error)
    except BrokenPipeError as error:
        # The reader of stdout has closed it.
        return exit_status_of(error)
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"error: {_message(error)}", file=sys.stderr)
        return exit_status_of(error)


def discard(stream: IO[str]) -> None:
    """Redirect a stream to nowhere: Python would fail at exit to write its buffer."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _message(error: Exception) -> str:
    if isinstance(error, PipelineError):
        return str(error)
    return printable_lines(f"{type(error).__name__}: {error}") + " (debug=true shows the traceback)"
