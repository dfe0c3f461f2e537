"""Parts that add components: modules, which may be absent, and others' entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from pipeline.core.errors import find_absent_part, first_line, printable

COMPONENTS = "pipeline.components"
"""Group whose entries name modules of components."""
COMMANDS = "pipeline.commands"
"""Group whose entries name commands of click."""
_missing: dict[str, str] = {}
"""Why a part isn't there, by its name."""


def list_entries(group: str) -> Iterator[tuple[str, EntryPoint]]:
    """Yield the entry points of a group, each after the name of its distribution. Those of the
    working folder are left out: Python lists them too, but it may hold a stranger's data."""
    for entry in entry_points(group=group):
        if entry.dist is not None and Path(str(entry.dist.locate_file(""))).resolve() != Path.cwd():
            yield entry.dist.name, entry


def load_entries(group: str) -> None:
    """Import what the entry points of a group name. Warn of those that fail, and note them."""
    for distribution, entry in list_entries(group):
        try:
            entry.load()
        except (Exception, SystemExit) as error:
            reason = printable(f"can't be imported: {type(error).__name__}: {first_line(error)}")
            note_missing_part(distribution, reason)
            print(f"warning: {distribution}: {reason}", file=sys.stderr)


def import_unless_absent(name: str, load: Callable[[], object]) -> None:
    """Call `load`, which imports the module `name`. Note a part of this package that it lacks."""
    try:
        load()
    except ModuleNotFoundError as error:
        part = find_absent_part(error)
        if part is None:
            raise
        note_missing_part(name, f"{part} isn't installed")


def note_missing_part(name: str, reason: str) -> None:
    """Remember why a part isn't there, for messages about what it would add."""
    _missing[name] = reason


def list_missing_parts() -> Mapping[str, str]:
    """Return why parts aren't there, by their names."""
    return dict(_missing)
