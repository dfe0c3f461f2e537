"""What a command says of itself: `python -m pipeline COMMAND --help`."""

from __future__ import annotations

from collections.abc import Sequence

HELP = ("--help", "-h")


def asks_for_help(args: Sequence[str]) -> bool:
    """Do the arguments of a command ask what it takes?"""
    return any(arg in HELP for arg in args)


def show_usage(text: str) -> int:
    """Print what a command takes; the exit status is 0."""
    print(text.strip())
    return 0
