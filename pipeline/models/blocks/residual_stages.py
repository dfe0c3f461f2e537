"""Networks in stages: blocks of the same features in a row, whose first one may halve the image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageBlock:
    """Where a block stands: the stage, counted from 1, and its place there, from 0."""

    stage: int
    index: int
    channels: int
    """What the block reads."""
    width: int
    """The features of its stage."""
    stride: int

    @property
    def scope(self) -> str:
        """What its layers are called after."""
        return f"stage{self.stage}_block{self.index}"


def stage_blocks(
    counts: Sequence[int],
    widths: Sequence[int],
    channels: int,
    *,
    expansion: int = 1,
    halve_first: bool = True,
) -> Iterator[StageBlock]:
    """The blocks of all stages, of which the first reads `channels`.

    A block gives `expansion` times the width of its stage. Every stage halves the image in its
    first block; without `halve_first`, the first stage does not.
    """
    for stage, (count, width) in enumerate(zip(counts, widths, strict=True), start=1):
        for index in range(count):
            halves = index == 0 and (halve_first or stage > 1)
            yield StageBlock(stage, index, channels, width, 2 if halves else 1)
            channels = width * expansion


def check_stages(**lists: Sequence[int]) -> None:
    """Raise ValueError unless the lists are equally long, and have an entry at all."""
    lengths = {len(entries) for entries in lists.values()}
    if len(lengths) > 1 or 0 in lengths:
        shown = " and ".join(f"{name} {list(entries)}" for name, entries in lists.items())
        raise ValueError(f"{shown} must have one entry per stage each")
