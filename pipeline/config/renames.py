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

    A regex's groups are `\\1` to `\\9` in `to`; in a glob each `*` and `?` is a group. Regular
    expressions are RE2's, which have no lookaround and no backreferences. RE2's time is linear in
    a name's length for any expression, while the time of Python's `re` can be exponential.
    """

    match: Annotated[str, Field(max_length=MAX_PATTERN_LENGTH)]
    to: str | None
    """null: the entry is skipped."""
    syntax: Literal["regex", "glob"] = "regex"

    @model_validator(mode="after")
    def _require_groups(self) -> Self:
        """Raise ValueError if `to` has a group that `match` lacks."""
        pattern = self.pattern
        for group in map(int, _GROUP.findall(self.to or "")):
            if group > pattern.groups:
                raise ValueError(
                    f"to {self.to!r} has group {group}, and match {self.match!r} has "
                    f"{pattern.groups}"
                )
        return self

    @property
    def pattern(self) -> Any:
        """The compiled pattern, for entire names. Raises ValueError if `match` is invalid."""
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
