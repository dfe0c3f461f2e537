"""The section `dump` of a recipe: which tensors of which steps are written to files."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from pipeline.core.registry import FilePath, Seq, Spec

MAX_DUMPED = 10_000
"""A run dumps at most this many steps."""
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")

What = Literal["input", "output", "all"]
Content = Literal["statistics", "tensors"]


def parse_steps(text: str) -> tuple[int, ...]:
    """Return the steps of a text such as `0|5|10`, `5-10` or `0|5-10`, ascending.

    Raises ValueError for any other text, and for more than `MAX_DUMPED` steps.
    """
    steps: set[int] = set()
    for part in text.split("|"):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"must be steps such as 0|5|10 or 5-10, not {part!r:.40}")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"{part}: must not end before its first step")
        if last - first >= MAX_DUMPED:
            raise ValueError(f"{part}: must be at most {MAX_DUMPED:,} steps")
        steps.update(range(first, last + 1))
        if len(steps) > MAX_DUMPED:
            raise ValueError(f"{len(steps):,} steps or more; must be at most {MAX_DUMPED:,}")
    return tuple(sorted(steps))


def _require_steps(text: str) -> str:
    """Return `text`. Raises ValueError if `parse_steps` can't read it."""
    parse_steps(text)
    return text


Steps = Annotated[
    str,
    # YAML reads 500 as a number.
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    AfterValidator(_require_steps),
]
"""Numbers of finished steps, such as `0|5|10` or `5-10`; 0 is before the first step."""


class DumpSpec(Spec):
    """Dumps during a run. A dump after N steps has the tensors of the step that follows."""

    steps: Steps | None
    """Numbers of steps done, such as 0|5|10 or 5-10; null: no dump. Sinks are split there."""
    layers: Seq[str]
    """Patterns of layers, such as conv_*; [] for all."""
    what: What
    """input: the inputs of a layer in the forward and the backward pass; output: its results in
    both; all: inputs and outputs."""
    content: Content
    """tensors: whole arrays as .npy files; statistics: their minimum, maximum, mean and others."""
    path: FilePath | None
    """An existing folder; null: `dump` in the run directory."""
    max_mib: Annotated[PositiveInt, Field(le=1_000_000)]
    """Limit of the arrays of one step, in MiB. Tensors beyond it have only statistics."""
