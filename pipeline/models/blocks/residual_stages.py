"""Stages of residual networks: blocks of the same width, the first of which may halve the image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageBlock:
    """One block: the number of its stage, from 1, and its index there, from 0."""

    stage: int
    index: int
    channels: int
    """Channels of the block's input."""
    width: int
    """The features of its stage."""
    stride: int

    @property
    def scope(self) -> str:
        """Scope of its layers in parameter paths."""
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
    """Raise ValueError unless the lists are equally long and not empty."""
    lengths = {len(entries) for entries in lists.values()}
    if len(lengths) > 1 or 0 in lengths:
        shown = " and ".join(f"{name} {list(entries)}" for name, entries in lists.items())
        raise ValueError(f"{shown} must have one entry per stage each")
