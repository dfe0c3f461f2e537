"""The directory of a run, and the writes that wait until the run may change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.training.parallel.ranks import Ranks

Write = Callable[[], object]


class HeldWrites:
    """Writes that wait for `release`; where nothing is held, each is done at once."""

    def __init__(self, *, held: bool = False) -> None:
        self.is_held = held
        self._waiting: list[Write] = []

    def add(self, write: Write) -> None:
        """Do a write, or let it wait."""
        if self.is_held:
            self._waiting.append(write)
        else:
            write()

    def release(self) -> None:
        """Do the writes that wait, in order; later ones wait no more. Raises what they raise."""
        self.is_held = False
        waiting, self._waiting = self._waiting, []
        for write in waiting:
            write()


@dataclass(frozen=True)
class RunFolder:
    """A run directory. A run that is resumed in it leaves it as it is until it can go on.

    Whatever refuses the run, or kills its process, the files are then those of the run so far.
    """

    path: Path
    accepted: HeldWrites = field(default_factory=HeldWrites)
    """Writes that wait until nothing can refuse the run: its log, its provenance, its lowerings."""
    advanced: HeldWrites = field(default_factory=HeldWrites)
    """Writes that wait for the first new step, or the end of a run without one: they replace what
    the directory says of the run so far."""
    resuming: bool = False
    """Whether the run goes on in the directory of an earlier one."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that share the directory; only the first one writes."""


def open_folder(run_dir: Path, ranks: Ranks, *, resuming: bool) -> RunFolder:
    """Return the folder of a run, which holds the writes of one that is resumed."""
    accepted, advanced = HeldWrites(held=resuming), HeldWrites(held=resuming)
    return RunFolder(run_dir, accepted, advanced, resuming, ranks)
