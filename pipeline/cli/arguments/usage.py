"""Usage texts of commands, versions, and the message for a command that doesn't exist."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

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


def refuse_command(name: str, known: Iterable[str]) -> NoReturn:
    """Raise UsageError for a first argument that isn't a command; it may be a recipe's name."""
    from pipeline.config.files import find_recipes
    from pipeline.core.errors import UsageError
    from pipeline.core.files.error_text import no_such, shown

    if name in find_recipes(Path.cwd()) or name.endswith(".yaml"):
        raise UsageError([shown(name)], f"is a recipe; to train it, type +recipe={shown(name)}")
    if name == "train":
        raise UsageError([name], "must be left out; arguments without a command train")
    reason = no_such("command", name, known)
    raise UsageError([shown(name)], f"{reason}; a key is typed as KEY=VALUE")
