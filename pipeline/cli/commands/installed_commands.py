"""Commands that other distributions add, by entry points of the group `pipeline.commands`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint

import click

from pipeline.core.errors import UsageError, first_line, printable
from pipeline.core.plugins.parts import COMMANDS, list_entries


def find_installed_command(name: str) -> click.Command | None:
    """Return another distribution's command; None if none has the name. Raises UsageError if it
    can't be imported or isn't a command."""
    for distribution, entry in list_entries(COMMANDS):
        if entry.name == name:
            return _load(distribution, entry)
    return None


def list_installed_commands() -> Mapping[str, click.Command]:
    """Return the commands of other distributions by name. One that can't be imported is named on
    stderr and left out."""
    commands: dict[str, click.Command] = {}
    for distribution, entry in list_entries(COMMANDS):
        try:
            commands.setdefault(entry.name, _load(distribution, entry))
        except UsageError as error:
            print(f"warning: {error}", file=sys.stderr)
    return commands


def _load(distribution: str, entry: EntryPoint) -> click.Command:
    try:
        command = entry.load()
    except (Exception, SystemExit) as error:
        reason = printable(f"{type(error).__name__}: {first_line(error)}")
        raise UsageError(
            [entry.name], f"can't be imported from {distribution}: {reason}"
        ) from error
    if not isinstance(command, click.Command):
        raise UsageError(
            [entry.name],
            f"{entry.value} of {distribution} must be a command of click, and is a "
            f"{type(command).__name__}",
        )
    return command
