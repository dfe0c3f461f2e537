"""The class of every published step, and the split of the rows by network.

classes.csv has all rows that were collected, by id: the network, the population (`tuned`: official
pages of a model zoo, MindCV, benchmark pages; `community`: the others, by the folder of the
source) and the class, which was decided before the row was priced, from the row alone.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast

CLASSES_FILE = Path(__file__).with_name("classes.csv")

RowClass = Literal["device", "host", "doubtful", "undescribed"]
"""`device`: the device's time. `host`: an upper bound of it, as the host may be slower. `doubtful`:
what the figure means isn't certain. `undescribed`: the source lacks something that the step's time
depends on, or the network has work that the model doesn't know. All but `device` have a reason."""
Population = Literal["tuned", "community"]
Part = Literal["fit", "look", "seal"]
"""Which rows a fit reads, which are looked at between fits, and which are scored by `--seal` alone.
"""
FIT_SHARE, LOOK_SHARE = 0.6, 0.2


@dataclass(frozen=True)
class ClassedRow:
    """The class of a published row. `reason` is empty for `device`, or says what else is known."""

    id: str
    network: str
    population: Population
    row_class: RowClass
    reason: str

    @property
    def part(self) -> Part:
        """The part of the row's network."""
        return split_by_name(self.network)


def split_by_name(network: str) -> Part:
    """Return the part of a network: a hash of the name, so that nobody chooses."""
    place = int(hashlib.sha256(network.encode()).hexdigest()[:8], 16) / 2**32
    if place < FIT_SHARE:
        return "fit"
    return "look" if place < FIT_SHARE + LOOK_SHARE else "seal"


@cache
def load_classes(file: Path = CLASSES_FILE) -> Mapping[str, ClassedRow]:
    """Return the classes of all collected rows by id."""
    with file.open(newline="", encoding="utf-8") as lines:
        return {
            row["id"]: ClassedRow(
                row["id"],
                row["network"],
                cast(Population, row["population"]),
                cast(RowClass, row["class"]),
                row["reason"],
            )
            for row in csv.DictReader(lines)
        }
