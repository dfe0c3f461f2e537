"""Errors for the user, shown as one message without a traceback, and their exit statuses.

`hide_secrets` removes passwords from all texts that are shown or written to files.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, Literal

MAX_PROBLEMS = 50
"""A message has at most this many problems; a larger number usually has one cause."""
MAX_PROBLEM_LENGTH = 2_000
"""A problem in a message has at most this many characters."""
HIDDEN = "***"
"""Text that replaces a secret."""
# Repetitions are bounded, since strangers may make texts on which a search takes long.
_NAMES = (
    r"(?:\w{0,40}(?:passwo?r?d|passphrase|secret)|pwd|token|credentials?"
    r"|(?:\w{0,40}_)?(?:api|access|auth|private|secret)_?(?:key|token))"
)
"""Names of secrets."""
_SECRET_NAME = re.compile(_NAMES, re.IGNORECASE)
_VALUE = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;&'"\])}]+)"""
"""A value in quotes, or up to a space or a separator."""
_QUERY_NAMES = r"[\w-]{0,40}(?:passw|pwd|token|secret|key|sig|credential|auth)[\w-]{0,40}"
"""Names of secrets in the query of an address, after a ? or &."""
_NAME_HINT = re.compile("pass|secret|pwd|token|credential|key|sig|auth", re.IGNORECASE)
"""Part of every name of a secret: texts without it needn't be searched for names."""
_IN_ADDRESSES = (
    # A password may have any character: https://user:p@ss/word@host.
    re.compile(r"""(?i)(?<![\w+.-])([a-z][\w+.-]{0,40}://[^\s/@:'"]{0,100}:)[^\s'"]{0,300}(@)"""),
    re.compile(r"""(?i)(\bhttps?://)[^\s/@:'"]{1,300}(@)"""),
)
_BY_NAME = (
    re.compile(rf"""(?i)([?&;]{_QUERY_NAMES}=)[^&\s'"#]+()"""),
    re.compile(rf"(?i)((?<!\w){_NAMES}\s*=\s*){_VALUE}()"),
    re.compile(rf"""(?i)([{{,]\s*["']?{_NAMES}["']?\s*:\s*){_VALUE}()"""),
)
"""Patterns of secrets. The text between the two groups of a pattern is replaced."""


class PipelineError(Exception):
    """An error for the user; its message has the problem, the value and what would be right."""

    exit_status = 1

    def __init__(self, message: str) -> None:
        super().__init__(printable_lines(message))


class RunError(PipelineError):
    """A failure with a valid recipe: of a device or a disk, or a loss that isn't finite."""


class RecipeError(PipelineError):
    """An invalid recipe: one problem or several, each starting with its dotted key."""

    exit_status = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        # Names in a problem may have newlines and any length.
        lines = map(printable, (problems,) if isinstance(problems, str) else problems)
        self.problems = tuple(
            line if len(line) <= MAX_PROBLEM_LENGTH else f"{line[: MAX_PROBLEM_LENGTH - 3]}..."
            for line in lines
        )
        count = len(self.problems)
        head = "the recipe has a problem:" if count == 1 else f"the recipe has {count:,} problems:"
        super().__init__(
            "\n".join([head, *(f"  {line}" for line in limit_problems(self.problems))])
        )


class UsageError(PipelineError):
    """Invalid arguments of a command; the message has the arguments and the broken rule."""

    exit_status = 2

    def __init__(self, arguments: Sequence[str], rule: str) -> None:
        super().__init__(f"{' '.join(arguments) or 'nothing'}: {rule}")


class DataError(PipelineError):
    """Data that is missing, unreadable or different from the recipe's description."""

    exit_status = 2


SUCCEEDED = ("done", "pruned")
"""Final statuses of a run that needs no further work."""


def get_exit_status(outcome: BaseException | str) -> int:
    """Return the exit status for an error, or for the status of a run such as "done".

    It is 0 for success, 2 if a recipe or its data is wrong, 75 (EX_TEMPFAIL of sysexits.h) if a
    signal stopped it, so that the same command may be run again, and 1 for any other failure.
    """
    if isinstance(outcome, PipelineError):
        return outcome.exit_status
    status = get_status_after(outcome) if isinstance(outcome, BaseException) else outcome
    if status == "stopped":
        return os.EX_TEMPFAIL
    return 0 if status in SUCCEEDED else 1


def get_status_after(error: BaseException) -> Literal["failed", "stopped"]:
    """Return the status of a run that an error ended: "stopped" if a signal or a scheduler did."""
    return "failed" if isinstance(error, Exception) else "stopped"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the error's type if it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def get_system_reason(error: Exception) -> str:
    """Return the system's words for an error, without its number and path; the first line of any
    other error."""
    return getattr(error, "strerror", None) or first_line(error)


def limit_problems(problems: Sequence[str]) -> list[str]:
    """Return the first MAX_PROBLEMS problems, and a line with the number of further problems."""
    num_left = len(problems) - MAX_PROBLEMS
    return [*problems[:MAX_PROBLEMS], *([f"... and {num_left:,} more"] if num_left > 0 else [])]


def hide_secrets(text: str) -> str:
    """Return a text with `***` for passwords and tokens.

    They are found in addresses, and as values of names such as `password` or `api_key`.
    """
    patterns = _IN_ADDRESSES if "://" in text and "@" in text else ()
    for pattern in (*patterns, *(_BY_NAME if _NAME_HINT.search(text) else ())):
        text = pattern.sub(rf"\1{HIDDEN}\2", text)
    return text


def is_secret_name(name: str) -> bool:
    """Return whether a value of this name is a secret: password, token, api_key, ..."""
    return _SECRET_NAME.fullmatch(name) is not None


def hide_secrets_in_tree(tree: Any) -> Any:
    """Return a tree of sections, lists and values with `***` for passwords and tokens."""
    if isinstance(tree, dict):
        return {
            key: HIDDEN
            if isinstance(value, str) and is_secret_name(str(key))
            else hide_secrets_in_tree(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [hide_secrets_in_tree(value) for value in tree]
    return hide_secrets(tree) if isinstance(tree, str) else tree


def printable(text: str) -> str:
    """Return a text without secrets and with escaped control characters: names may have both."""
    text = hide_secrets(text)
    return text if text.isprintable() else repr(text)[1:-1]


def printable_lines(text: str) -> str:
    """Return a text of several lines without secrets, with control characters escaped in each."""
    return "\n".join(map(printable, text.split("\n")))


def report_errors(action: Callable[[], int], *, debug: bool) -> int:
    """Run an action; print an error as one message on stderr, and return the exit status.

    Before it returns, stdout is flushed, or discarded if it can't be written.
    """
    try:
        status = action()
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        status = get_exit_status(error)
    except BrokenPipeError as error:
        # The reader of stdout has closed it.
        status = get_exit_status(error)
    except Exception as error:
        if debug:
            traceback.print_exc()
        message = str(error)
        if not isinstance(error, PipelineError):
            text = printable_lines(f"{type(error).__name__}: {error}")
            message = f"{text} (debug=true shows the traceback)"
        print(f"error: {message}", file=sys.stderr)
        status = get_exit_status(error)
    try:
        sys.stdout.flush()
    except OSError as error:
        redirect_to_null(sys.stdout)
        if status == 0 and not isinstance(error, BrokenPipeError):
            print(f"error: the output can't be written: {error.strerror}", file=sys.stderr)
        return status or get_exit_status(error)
    return status


def redirect_to_null(stream: IO[str]) -> None:
    """Redirect a stream to the null device; otherwise Python fails to flush the stream at exit."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
