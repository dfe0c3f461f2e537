"""The protocol of a validation: classes of published steps, coverage, the log of sealed rows.

Rows are split by network. The coverage is how many published times an interval of a level has.
Sealed rows are scored at most once in seven days.

classes.csv has all rows that were collected, by id: the network, the population (`tuned`: official
pages of a model zoo, MindCV, benchmark pages; `community`: the others, by the folder of the
source) and the class, which was decided before the row was priced, from the row alone.

Each line of the log has the date, the commit of the code, the number of fits that were tried until
then, a group of rows, and its score.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Literal, cast

import numpy as np
from scipy.stats import norm

from pipeline.core.errors import RunError
from pipeline.core.files.value_text import count_noun
from pipeline.core.pages.charts import Curve, draw_curves
from pipeline.core.pages.page import Drawing

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
LEVELS = np.arange(1, 20) / 20
"""Nominal coverages from 5 to 95 %."""
SEAL_LOG = Path(__file__).with_name("seal_log.csv")
SEALED_FOR = timedelta(days=7)
"""Least time between two scores. Changes between frequent scores would fit the sealed rows."""
COLUMNS = (
    "date",
    "commit",
    "fits_tried",
    "group",
    "rows",
    "mean_error",
    "median_error",
    "kendall_tau",
    "coverage",
    "crps",
)


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


def observe_coverage(deviations: Sequence[float], levels: np.ndarray = LEVELS) -> np.ndarray:
    """Return the share of published times in the central interval of each nominal coverage.

    `deviations` are in standard deviations of a normal distribution, from its centre.
    """
    widths = norm.ppf(0.5 + levels / 2)
    return np.mean(np.abs(np.asarray(deviations)) <= widths[:, None], axis=1)


def draw_coverage(groups: Mapping[str, Sequence[float]]) -> Drawing:
    """Return a chart of the observed by the nominal coverage of groups of deviations."""
    curves = [
        Curve(f"{name}, {count_noun(len(group), 'step')}", LEVELS, observe_coverage(group))
        for name, group in groups.items()
    ]
    chart = draw_curves(
        "Observed coverage of intervals",
        [Curve("as nominal", LEVELS, LEVELS), *curves],
        "nominal coverage",
    )
    assert chart is not None
    return chart


def check_seal(today: date, log: Path = SEAL_LOG) -> None:
    """Raise RunError if the last score is less than `SEALED_FOR` old, or the log is damaged."""
    last = _read_last_date(log)
    if last is None:
        return
    opens = last + SEALED_FOR
    if today < opens:
        raise RunError(
            f"--seal: the sealed rows were scored on {last}, and it is {today}; they are scored at "
            f"most once in {SEALED_FOR.days} days, so the next score is on {opens} ({log.name})"
        )


def append_scores(rows: Sequence[Mapping[str, object]], log: Path = SEAL_LOG) -> None:
    """Append a line for each row, which has a value for each of `COLUMNS`."""
    is_new = not log.exists()
    with log.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def _read_last_date(log: Path) -> date | None:
    try:
        with log.open(newline="", encoding="utf-8") as lines:
            dates = [date.fromisoformat(row["date"]) for row in csv.DictReader(lines)]
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{log}: not a log of scores ({error!r}); must be a CSV file with the columns "
            f"{', '.join(COLUMNS)}"
        ) from error
    return max(dates, default=None)
