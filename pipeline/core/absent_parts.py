"""Parts of the package and of other packages that an installation lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

_absent: dict[str, str] = {}
"""Why a module of components wasn't imported, by its name."""


def find_absent_part(error: BaseException) -> str | None:
    """Return the module of this package that an import didn't find; None for another error."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return name if name is not None and name.startswith("pipeline.") else None


def import_unless_absent(name: str, load: Callable[[], object]) -> None:
    """Call `load`, which imports the module `name`. If a part of the package that it needs isn't
    installed, remember that."""
    try:
        load()
    except ModuleNotFoundError as error:
        part = find_absent_part(error)
        if part is None:
            raise
        _absent[name] = f"{part} isn't installed"


def note_broken_part(name: str, reason: str) -> None:
    """Remember why the components of another package can't be used."""
    _absent[name] = reason


def list_absent_parts() -> Mapping[str, str]:
    """Return why modules of components weren't imported, by their names."""
    return MappingProxyType(_absent)
