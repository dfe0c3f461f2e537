"""The message for a command that doesn't exist."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pipeline.cli.arguments.commands import command_words
from pipeline.config.files import find_recipes
from pipeline.core.errors import UsageError
from pipeline.core.files.error_text import no_such, shown


def main(args: Sequence[str]) -> NoReturn:
    """Raise UsageError for a first argument that isn't a command; it may be a recipe's name."""
    name = args[0]
    if name in find_recipes(Path.cwd()) or name.endswith(".yaml"):
        raise UsageError([shown(name)], f"is a recipe; to train it, type +recipe={shown(name)}")
    if name == "train":
        raise UsageError([name], "must be left out; arguments without a command train")
    reason = no_such("command", name, command_words())
    raise UsageError([shown(name)], f"{reason}; a key is typed as KEY=VALUE")
