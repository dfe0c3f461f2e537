"""Rules that rename the entries of a weight file."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from pipeline.core.registry import Spec

MAX_PATTERN_LENGTH = 1000
_GROUP = re.compile(r"\\([1-9])")


class RenameSpec(Spec):
    """A rule that renames entries: `to` replaces a name that `match` matches entirely.

    In `to`, `\\1` to `\\9` stand for the groups of `match`; each `*` and `?` of a glob is a group.
    Regular expressions are RE2's, without lookaround and backreferences: matching takes a time
    linear in the length of a name, while Python's `re` can take an exponential time.
    """

    match: Annotated[str, Field(max_length=MAX_PATTERN_LENGTH)]
    to: str | None
    """null: the entry is skipped."""
    syntax: Literal["regex", "glob"] = "regex"

    @model_validator(mode="after")
    def _require_groups(self) -> Self:
        """Raise ValueError if `to` has a group that `match` lacks."""
        num_groups = self.pattern.groups
        for digit in _GROUP.findall(self.to or ""):
            if int(digit) > num_groups:
                raise ValueError(
                    f"to {self.to!r} has group {digit}, and match {self.match!r} has {num_groups}"
                )
        return self

    @property
    def pattern(self) -> Any:
        """RE2's compiled pattern of `match`. Raises ValueError if `match` is invalid."""
        return _compile(self.match, self.syntax)

    def apply(self, name: str) -> str | None:
        """Return an entry's new name; None if it is skipped or doesn't match."""
        match = self.pattern.fullmatch(name)
        if self.to is None or match is None:
            return None
        return _GROUP.sub(lambda group: match[int(group[1])] or "", self.to)


@cache
def _compile(match: str, syntax: str) -> Any:
    # Imported here, since most recipes have no such rule.
    import re2

    options = re2.Options()
    options.log_errors = False
    wildcards = {"*": "(.*)", "?": "(.)"}
    regex = match
    if syntax == "glob":
        regex = "".join(wildcards.get(letter) or re2.escape(letter) for letter in match)
    try:
        return re2.compile(regex, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        raise ValueError(f"match {match!r} must be a regular expression: {reason}") from error
