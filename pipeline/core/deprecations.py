"""Deprecations: public names that will be removed, with their new spelling and both versions.

docs/versions.md has the promise: a name is removed two minor versions after its deprecation, or
later. This module imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

RECIPE: Final = "recipe.yaml"
SUMMARY: Final = "summary.json"


@dataclass(frozen=True)
class Deprecation:
    """A public name with a new spelling. Versions are MAJOR.MINOR."""

    file: Literal["recipe.yaml", "summary.json"]
    """The file of a run directory in which the name is still read or written."""
    name: str
    new_name: str
    since: str
    """Version with the new spelling."""
    removal: str
    """First version without the name."""


DEPRECATIONS = (
    Deprecation(RECIPE, "passes", "epochs", "1.0", "1.2"),
    Deprecation(RECIPE, "every_passes", "every_epochs", "1.0", "1.2"),
    Deprecation(RECIPE, "warmup_passes", "warmup_epochs", "1.0", "1.2"),
    Deprecation(RECIPE, "decay_passes", "decay_epochs", "1.0", "1.2"),
    Deprecation(RECIPE, "after_passes", "after_epochs", "1.0", "1.2"),
    Deprecation(SUMMARY, "passes", "epochs", "1.0", "1.2"),
)
"""All deprecations. A run's recipe may have the former keys; a recipe that a user writes is refused
with the new one, since they were renamed before 1.0."""
FORMER_KEYS: Mapping[str, str] = {
    entry.name: entry.new_name for entry in DEPRECATIONS if entry.file == RECIPE
}
"""New names of recipes' keys by their former names."""
