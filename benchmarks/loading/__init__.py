"""Input pipelines: CIFAR-10 in random order, cropped, flipped and normalised, batch by batch.

Each module has `open_loader(work) -> Loader`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

PAD = 4
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2023, 0.1994, 0.2010)


@dataclass(frozen=True)
class Work:
    """What is loaded: arrays of an .npz, images uint8 (n, 32, 32, 3) and labels; and how.

    `way` is one of those that a module offers, `workers` the processes of a loader that has some.
    """

    arrays: Path
    batch_size: int
    way: str
    workers: int


class Loaded(NamedTuple):
    """Batches that were loaded, and the mean and deviation of the last one's pixels."""

    batches: int
    mean: float
    std: float


class Loader(Protocol):
    """An input pipeline that has warmed up."""

    def load(self, batches: int) -> Loaded:
        """Load so many batches more; returns when the images of all of them exist."""
