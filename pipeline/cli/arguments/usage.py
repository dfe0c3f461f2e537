"""Usage texts of commands, and versions."""

from __future__ import annotations

import platform
from collections.abc import Sequence

HELP = ("--help", "-h")
VERSION = "--version"
DISTRIBUTION = "recipe-pipeline"


def asks_for_help(args: Sequence[str]) -> bool:
    """Return whether the arguments of a command ask for its usage."""
    return any(arg in HELP for arg in args)


def show_usage(text: str) -> int:
    """Print a command's usage; the exit status is 0."""
    print(text.strip())
    return 0


def show_versions() -> int:
    """Print the versions of this package, Python and jax; the exit status is 0."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version(DISTRIBUTION)
    except PackageNotFoundError:
        own = "not installed"
    print(f"{DISTRIBUTION} {own}, Python {platform.python_version()}, jax {version('jax')}")
    return 0
