"""Patterns over paths: what a recipe means by `residual_*`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

Path = tuple[str, ...]
"""The scopes of a layer from the outside in and, of a parameter, its own name at the end."""


def covers(pattern: str, path: Path) -> bool:
    """Whether a glob matches a path, or that of a scope around it; its * crosses slashes."""
    around = ("/".join(path[:depth]) for depth in range(1, len(path) + 1))
    return any(fnmatchcase(name, pattern) for name in around)


def require_covered(
    patterns: Sequence[str], paths: Sequence[Path], noun: str, key: str = ""
) -> None:
    """Raise ValueError, which begins with `key`, for a pattern that covers none of the paths."""
    names = ["/".join(path) for path in paths]
    for pattern in patterns:
        if not any(covers(pattern, path) for path in paths):
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(
                f"{key}pattern {pattern!r} matches none of the {len(names)} {noun}: {shown}"
            )
