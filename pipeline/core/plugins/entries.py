"""Entry points of other distributions, by which they add components and commands."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

COMPONENTS = "pipeline.components"
"""Group whose entries name modules of components."""
COMMANDS = "pipeline.commands"
"""Group whose entries name commands of click."""


def list_entries(group: str) -> Iterator[EntryPoint]:
    """Yield the entry points of a group, but not of a distribution in the working folder: Python
    lists them too, but that folder may hold a stranger's data."""
    for entry in entry_points(group=group):
        if entry.dist is not None and Path(str(entry.dist.locate_file(""))).resolve() != Path.cwd():
            yield entry


def get_distribution(entry: EntryPoint) -> str:
    """Return the name of the distribution that has an entry."""
    return entry.value if entry.dist is None else entry.dist.name
