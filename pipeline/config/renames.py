"""Rules by which the names in a weight file become others."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import model_validator

from pipeline.registry import Spec

_GROUP = re.compile(r"\\([1-9])")


class RenameSpec(Spec):
    """One rule: names that `match` matches as a whole become `to`.

    A regex's groups are `\\1` to `\\9` in `to`; in a glob each `*` and `?` is such a group.
    """

    match: str
    to: str | None
    """null: the entry is left out."""
    syntax: Literal["regex", "glob"] = "regex"

    @model_validator(mode="after")
    def _can_be_applied(self) -> Self:
        try:
            pattern = self.pattern
        except re.error as error:
            raise ValueError(f"match {self.match!r} is no regular expression: {error}") from error
        for group in map(int, _GROUP.findall(self.to or "")):
            if group > pattern.groups:
                raise ValueError(
                    f"to {self.to!r} takes group {group}, and match {self.match!r} has "
                    f"{pattern.groups}"
                )
        return self

    @property
    def pattern(self) -> re.Pattern[str]:
        """The rule's left side, to be matched against whole names."""
        if self.syntax == "regex":
            return re.compile(self.match)
        wild = {"*": "(.*)", "?": "(.)"}
        return re.compile("".join(wild.get(letter) or re.escape(letter) for letter in self.match))

    def apply(self, name: str) -> str | None:
        """What a name becomes that `pattern` matches; None where it is left out."""
        match = self.pattern.fullmatch(name)
        if self.to is None or match is None:
            return None
        return _GROUP.sub(lambda group: match[int(group[1])] or "", self.to)
