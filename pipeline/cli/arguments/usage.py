"""The usage text of a command: `python -m pipeline COMMAND --help`."""

from __future__ import annotations

from collections.abc import Sequence

HELP = ("--help", "-h")


def asks_for_help(args: Sequence[str]) -> bool:
    """Return whether the arguments of a command ask for its usage."""
    return any(arg in HELP for arg in args)


def show_usage(text: str) -> int:
    """Print a command's usage; the exit status is 0."""
    print(text.strip())
    return 0
