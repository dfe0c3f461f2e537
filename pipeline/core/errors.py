"""Errors for the user, shown as one message without a traceback, and their exit statuses.

`hide_secrets` removes passwords from all texts that are shown or written to files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any, Literal

MAX_PROBLEMS = 50
"""Most problems in a message. More problems usually have one cause."""
MAX_PROBLEM_LENGTH = 2_000
"""Most characters of a problem in a message."""
HIDDEN = "***"
"""Text that replaces a secret."""
# Repetitions in patterns are bounded, so that no text from a stranger makes a search slow.
_NAMES = (
    r"(?:\w{0,40}(?:passwo?r?d|passphrase|secret)|pwd|token|credentials?"
    r"|(?:\w{0,40}_)?(?:api|access|auth|private|secret)_?(?:key|token))"
)
"""Pattern of the names of secrets."""
_SECRET_NAME = re.compile(_NAMES, re.IGNORECASE)
_VALUE = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;&'"\])}]+)"""
"""Pattern of a value, which is in quotes, or ends before a space or a separator."""
_QUERY_NAMES = r"[\w-]{0,40}(?:passw|pwd|token|secret|key|sig|credential|auth)[\w-]{0,40}"
"""Pattern of the names of secrets in the query of an address, after a ? or &."""
_NAME_HINT = re.compile("pass|secret|pwd|token|credential|key|sig|auth", re.IGNORECASE)
"""Matches a part of every name of a secret, so that texts without a match aren't searched."""
_IN_ADDRESSES = (
    # A password may have any character: https://user:p@ss/word@host.
    re.compile(r"""(?i)(?<![\w+.-])([a-z][\w+.-]{0,40}://[^\s/@:'"]{0,100}:)[^\s'"]{0,1000}(@)"""),
    re.compile(r"""(?i)(\bhttps?://)[^\s/@:'"]{1,1000}(@)"""),
)
_BY_NAME = (
    re.compile(rf"""(?i)([?&;]{_QUERY_NAMES}=)[^&\s'"#]+()"""),
    re.compile(rf"(?i)((?<!\w){_NAMES}\s*=\s*){_VALUE}()"),
    re.compile(rf"""(?i)([{{,]\s*["']?{_NAMES}["']?\s*:\s*){_VALUE}()"""),
)
"""Patterns of secrets, here and in `_IN_ADDRESSES`: HIDDEN replaces the text between the groups."""


class PipelineError(Exception):
    """An error for the user. Its message has the problem, the wrong value and the valid ones."""

    exit_status = 1

    def __init__(self, message: str) -> None:
        super().__init__(printable_lines(message))


class RunError(PipelineError):
    """A failure with a valid recipe: of a device or a disk, or a loss that isn't finite."""


class RecipeError(PipelineError):
    """An invalid recipe: one problem or several, each starting with its dotted key."""

    exit_status = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        texts = (problems,) if isinstance(problems, str) else problems
        # Names in a problem may have newlines and any length.
        self.problems = tuple(shorten(printable(text), MAX_PROBLEM_LENGTH) for text in texts)
        count = len(self.problems)
        head = "the recipe has a problem:" if count == 1 else f"the recipe has {count:,} problems:"
        lines = [f"  {problem}" for problem in limit_problems(self.problems)]
        super().__init__("\n".join([head, *lines]))


class UsageError(PipelineError):
    """Invalid arguments of a command; the message has the arguments and the broken rule."""

    exit_status = 2

    def __init__(self, arguments: Sequence[str], rule: str) -> None:
        super().__init__(f"{' '.join(arguments) or 'nothing'}: {rule}")


class DataError(PipelineError):
    """Data that is missing, unreadable or different from the recipe's description."""

    exit_status = 2


SUCCEEDED = ("done", "pruned")
"""Final statuses of a run that succeeded."""


def get_exit_status(outcome: BaseException | str) -> int:
    """Return the exit status for an error, or for the status of a run such as "done".

    0: success; 2: a recipe, its data or an argument is wrong; 75 (EX_TEMPFAIL of sysexits.h): a
    signal stopped the run, so that the same command may be run again; 1: any other failure.
    """
    if isinstance(outcome, PipelineError):
        return outcome.exit_status
    status = get_status_after(outcome) if isinstance(outcome, BaseException) else outcome
    if status == "stopped":
        return os.EX_TEMPFAIL
    return 0 if status in SUCCEEDED else 1


def get_status_after(error: BaseException) -> Literal["failed", "stopped"]:
    """Return the status of a run that ended by an error; a signal's error means "stopped"."""
    return "failed" if isinstance(error, Exception) else "stopped"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its type if the line is empty."""
    lines = str(error).splitlines()
    return (lines[0] if lines else "") or type(error).__name__


def get_system_reason(error: Exception) -> str:
    """Return an OSError's reason, without number and path; the first line of any other error."""
    return getattr(error, "strerror", None) or first_line(error)


def limit_problems(problems: Sequence[str]) -> list[str]:
    """Return the first MAX_PROBLEMS problems, and a line with the number of further problems."""
    return limit_lines(problems, MAX_PROBLEMS, "... and ")


def limit_lines(lines: Sequence[str], max_count: int, before_more: str = "") -> list[str]:
    """Return the first `max_count` lines, and a line with the number of further lines."""
    num_left = len(lines) - max_count
    ending = [f"{before_more}{num_left:,} more"] if num_left > 0 else []
    return [*lines[:max_count], *ending]


def find_absent_part(error: BaseException) -> str | None:
    """Return the module of this package that an import didn't find; None for another error."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return name if name is not None and name.startswith("pipeline.") else None


def hide_secrets(text: str) -> str:
    """Return a text with `***` for passwords and tokens.

    They are found in addresses, and as values of names such as `password` or `api_key`.
    """
    patterns: list[re.Pattern[str]] = []
    if "://" in text and "@" in text:
        patterns += _IN_ADDRESSES
    if _NAME_HINT.search(text):
        patterns += _BY_NAME
    for pattern in patterns:
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


def shorten(text: str, max_length: int) -> str:
    """Return a text, or its beginning and three dots, in at most `max_length` characters."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def printable(text: str) -> str:
    """Return a text without secrets, with control characters escaped, such as newlines."""
    text = hide_secrets(text)
    return text if text.isprintable() else repr(text)[1:-1]


def printable_lines(text: str) -> str:
    """Return a text of several lines, each as `printable` returns it."""
    return "\n".join(map(printable, text.split("\n")))


def redirect_to_null(stream: IO[str]) -> None:
    """Redirect a stream that can't be written to the null device, so that Python can flush it."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
