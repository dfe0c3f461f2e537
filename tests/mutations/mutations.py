"""Mutations of one line, one for each row of docs/requirements.md, from mutations.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "mutations.toml"


@dataclass(frozen=True)
class Mutation:
    """A change of one line after which a feature isn't what its row promises."""

    code: str
    file: str
    """Relative to the root of the project."""
    old: str
    """Text within a line, which occurs once in the file."""
    new: str
    breaks: str
    """What a user would see."""

    def apply_to(self, text: str) -> str:
        """Return the mutated text. Raises ValueError if the old text doesn't occur once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {count} times, not once")
        return text.replace(self.old, self.new)


def read_mutations() -> dict[str, Mutation]:
    """Return the mutations by code."""
    rows = tomllib.loads(FILE.read_text())
    return {code: Mutation(code, **row) for code, row in rows.items()}
