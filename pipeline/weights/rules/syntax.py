"""What a rule for the name of a layer says, and what comes of one."""

from __future__ import annotations

import re
from dataclasses import dataclass

LayerRules = tuple[tuple[str, str], ...]
"""A pattern for the whole name of a layer in a file, and its path here. The first that matches
counts. In a path

    \\1       is what the pattern's group matched, and <\\1-1> that number less 1,
    {kind}   is conv, dense, batch_norm or layer_norm, told by the arrays that the layer has,
    #        counts the layers that come to the same path otherwise, in the order of the file or,
             where that keeps none, of the numbers in their names; what fits nowhere is passed over,
    {a,b}    spreads an array over several, in equal parts of its first axis,
    ^T       at the end says that the layer keeps its weight as (in, out),
    +        at the start says that its first row is added to every row of the array here.

No path at all leaves the layer out.
"""

SKIPPED = ""

_SUM = re.compile(r"<(\d+)([+-]\d+)>")
_TRANSPOSED = "^T"
_ADDED = "+"


@dataclass(frozen=True)
class Place:
    """Where a rule puts a layer."""

    path: str
    transposed: bool = False
    """Is its weight (in, out)?"""
    added: bool = False
    """Is its first row added to every row of another's?"""


def place_by(rules: LayerRules, layer: str, kind: str) -> Place | None:
    """Where the rules put a layer; None where none knows it. Without a kind, rules that need one
    are passed over."""
    for pattern, path in rules:
        match = re.fullmatch(pattern, layer)
        if match is not None and (kind or "{kind}" not in path):
            return _place(match.expand(path).replace("{kind}", kind))
    return None


def _place(text: str) -> Place:
    path = _SUM.sub(lambda terms: str(int(terms[1]) + int(terms[2])), text)
    return Place(
        path.removeprefix(_ADDED).removesuffix(_TRANSPOSED),
        transposed=path.endswith(_TRANSPOSED),
        added=path.startswith(_ADDED),
    )
