"""Deprecations: public names that will be removed, with their new spelling and both versions.

docs/versions.md has the promise: a name is removed two minor versions after its deprecation, or
later, and until then it works with a warning. This module imports nothing of the package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

RECIPE: Final = "recipe.yaml"
SUMMARY: Final = "summary.json"
KEY: Final = "key"
COMMAND: Final = "command"
OPTION: Final = "option"


@dataclass(frozen=True)
class Deprecation:
    """A public name with a new spelling. Versions are MAJOR.MINOR.

    A name in "recipe.yaml" or "summary.json" is read or written in the file of a run alone. Others
    work wherever a user types them, with a warning: a dotted key of a recipe, in files too; the
    words of a command; an option after its command, as in `report --samples`.
    """

    place: Literal["recipe.yaml", "summary.json", "key", "command", "option"]
    name: str
    new_name: str
    """New spelling in the same form; of an option without its command."""
    since: str
    """Version with the new spelling."""
    removal: str
    """First version without the name."""


DEPRECATIONS: Sequence[Deprecation] = (
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
    entry.name: entry.new_name for entry in DEPRECATIONS if entry.place == RECIPE
}
"""New names of recipes' keys by their former names."""
_warned: set[tuple[str, str]] = set()


def list_deprecated(place: str) -> Iterator[Deprecation]:
    """Yield the deprecations of a place."""
    return (entry for entry in DEPRECATIONS if entry.place == place)


def warn_of_deprecation(entry: Deprecation, source: str = "") -> None:
    """Print a warning on stderr, once in a process for each file `source` or the command line."""
    if (entry.name, source) in _warned:
        return
    _warned.add((entry.name, source))
    begin = f"{source}: " if source else ""
    print(
        f"warning: {begin}{entry.name}: is called {entry.new_name} now; the former name works "
        f"until version {entry.removal}",
        file=sys.stderr,
    )


def rename_key(key: str) -> tuple[str, Deprecation | None]:
    """Return a dotted key in its new spelling, and its deprecation or that of a section above."""
    for entry in list_deprecated(KEY):
        if key == entry.name or key.startswith(f"{entry.name}."):
            return f"{entry.new_name}{key.removeprefix(entry.name)}", entry
    return key, None


def rename_references(text: str) -> str:
    """Return a text with the new spellings of keys to which it refers, as in `${train.steps}`."""
    for entry in list_deprecated(KEY):
        pattern = r"\$\{" + re.escape(entry.name) + r"(?=[.\[}])"
        text = re.sub(pattern, f"${{{entry.new_name}", text)
    return text


def rename_overrides(words: Sequence[str]) -> list[str]:
    """Return words of a command line with the new spellings of keys, as in `++train.steps=3`.

    Warns of deprecated keys.
    """
    renamed = []
    for word in words:
        bare = word.lstrip("+~")
        key, equals, value = bare.partition("=")
        new_key, entry = rename_key(key)
        is_key = entry is not None and (equals or word.startswith("~"))
        if entry is not None and is_key:
            warn_of_deprecation(entry)
            word = f"{word[: len(word) - len(bare)]}{new_key}{equals}{value}"
        renamed.append(rename_references(word))
    return renamed


def rename_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a process with the new spellings of command, options and keys.

    Warns of deprecated ones.
    """
    words = list(arguments)
    for entry in list_deprecated(OPTION):
        *command, option = entry.name.split()
        for position, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name == option and words[: len(command)] == command:
                warn_of_deprecation(entry)
                words[position] = f"{entry.new_name}{equals}{value}"
    for entry in list_deprecated(COMMAND):
        command = entry.name.split()
        if words[: len(command)] == command:
            warn_of_deprecation(entry)
            words[: len(command)] = entry.new_name.split()
    return rename_overrides(words)
