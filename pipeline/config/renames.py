"""Rules that rename the entries of a weight file."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from pipeline.core.registry import Spec

MAX_LENGTH = 1000
_GROUP = re.compile(r"\\([1-9])")


class RenameSpec(Spec):
    """One rule: names that `match` matches entirely become `to`.

    A regex's groups are `\\1` to `\\9` in `to`; in a glob each `*` and `?` is such a group.
    Regular expressions are RE2's: Python's without lookaround and backreferences. RE2 takes
    time linear in a name's length for any expression; Python's can take centuries for a name
    of 30 letters.
    """

    match: Annotated[str, Field(max_length=MAX_LENGTH)]
    to: str | None
    """null: the entry is skipped."""
    syntax: Literal["regex", "glob"] = "regex"

    @model_validator(mode="after")
    def _can_be_applied(self) -> Self:
        pattern = self.pattern
        for group in map(int, _GROUP.findall(self.to or "")):
            if group > pattern.groups:
                raise ValueError(
                    f"to {self.to!r} takes group {group}, and match {self.match!r} has "
                    f"{pattern.groups}"
                )
        return self

    @property
    def pattern(self) -> Any:
        """The compiled pattern, to be matched against entire names. Raises ValueError."""
        return _compile(self.match, self.syntax)

    def apply(self, name: str) -> str | None:
        """Return the new name of an entry that `pattern` matches; None if it is skipped."""
        match = self.pattern.fullmatch(name)
        if self.to is None or match is None:
            return None
        return _GROUP.sub(lambda group: match[int(group[1])] or "", self.to)


@cache
def _compile(match: str, syntax: str) -> Any:
    # Imported here: most recipes have no such rule, and need not wait for the library.
    import re2

    options = re2.Options()
    options.log_errors = False
    wild = {"*": "(.*)", "?": "(.)"}
    text = match
    if syntax == "glob":
        text = "".join(wild.get(letter) or re2.escape(letter) for letter in match)
    try:
        return re2.compile(text, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        raise ValueError(f"match {match!r} is no regular expression: {reason}") from error
