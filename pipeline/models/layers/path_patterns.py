"""Glob patterns over the paths of layers and parameters, such as `residual_*`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from pipeline.core.files.name_text import find_nearest, show_name

SAMPLE_LOSSES = "sample_losses"
"""Collection of a network with the losses that layers add to the losses of samples."""
LayerPath = tuple[str, ...]
"""Scopes of a layer, outermost first. A parameter's path ends with its name."""

MAX_SCOPES = 40
"""An error lists at most this many scopes."""
EXCEPT = "!"
"""Prefix of a pattern that excludes the paths that it covers."""


def covers(pattern: str, path: LayerPath) -> bool:
    """Return whether a glob matches a path or an enclosing scope. A * also matches slashes."""
    scopes = ("/".join(path[:depth]) for depth in range(1, len(path) + 1))
    return any(fnmatchcase(scope, pattern) for scope in scopes)


def is_frozen(patterns: Sequence[str], path: LayerPath) -> bool:
    """Return whether a parameter is frozen, by the last pattern that covers it. A pattern that
    begins with ! trains the parameters that it covers, other patterns freeze them. Parameters that
    no pattern covers are frozen if the first pattern begins with !, else trained."""
    frozen = bool(patterns) and patterns[0].startswith(EXCEPT)
    for pattern in patterns:
        if covers(pattern.removeprefix(EXCEPT), path):
            frozen = not pattern.startswith(EXCEPT)
    return frozen


def require_covered(
    patterns: Sequence[str], paths: Sequence[LayerPath], noun: str, prefix: str = ""
) -> None:
    """Raise ValueError for the first pattern that covers no path. Patterns have no `!`. The message
    begins with `prefix`, such as `init.rules: `, and has the number of paths in each outermost
    scope."""
    for pattern in patterns:
        if any(covers(pattern, path) for path in paths):
            continue
        if not paths:
            raise ValueError(f"{prefix}pattern {show_name(repr(pattern))}: there are no {noun}")
        counts = count_outermost_scopes(paths)
        scopes = [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
        if len(scopes) > MAX_SCOPES:
            scopes[MAX_SCOPES:] = ["..."]
        guess = find_nearest(pattern, counts)
        hint = f"; did you mean {guess}?" if guess else ""
        raise ValueError(
            f"{prefix}pattern {show_name(repr(pattern))} matches none of the {len(paths)} {noun} "
            f"in {', '.join(scopes)}, such as {'/'.join(paths[0])}{hint}"
        )


def count_outermost_scopes(paths: Sequence[LayerPath]) -> dict[str, int]:
    """Return the outermost scopes that distinguish paths, and the number of paths in each."""
    max_depth = max(map(len, paths))
    for depth in range(1, max_depth + 1):
        counts = Counter("/".join(path[:depth]) for path in paths)
        if len(counts) > 1:
            break
    return dict(counts)
