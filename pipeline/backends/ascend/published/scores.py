"""Scores of modelled times and their intervals against published ones, and the protocol of a
validation: classes of published steps, coverage, the log of sealed rows."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
from scipy.stats import kstest, norm

from pipeline.backends.ascend.cost.efficiency import NORMAL_90
from pipeline.backends.ascend.published.workloads import Published
from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import convert_write_errors, lock_file
from pipeline.core.files.value_text import count_noun
from pipeline.core.pages.charts import Curve, draw_curves
from pipeline.core.pages.page import Drawing


@dataclass(frozen=True)
class PricedRow:
    """A published row, its modelled time, and the 80 % interval of the published time.

    The time's log is normal around the interval's centre, which may be another than the modelled
    time.
    """

    row: Published
    modelled_ms: float
    low_ms: float
    high_ms: float

    @property
    def error(self) -> float:
        """Relative error of the modelled time, 0.1 if it is 10 % too long."""
        return self.modelled_ms / self.row.ms - 1

    @property
    def inside(self) -> bool:
        """Whether the published time is in the interval."""
        return self.low_ms <= self.row.ms <= self.high_ms

    @property
    def log_sd(self) -> float:
        """Standard deviation of the log of the time, a normal distribution with this interval."""
        return math.log(self.high_ms / self.low_ms) / (2 * NORMAL_90)

    @property
    def deviation(self) -> float:
        """Log of (published time / the interval's centre), in units of `log_sd`."""
        return math.log(self.row.ms / math.sqrt(self.low_ms * self.high_ms)) / self.log_sd

    @property
    def crps(self) -> float:
        """Continuous ranked probability score of the log of the published time; 0 is the best.

        The closed form for a normal distribution (Gneiting and Raftery 2007, section 4.2).
        """
        z = self.deviation
        error_term = z * (2 * norm.cdf(z) - 1)
        spread_term = 2 * norm.pdf(z) - 1 / math.sqrt(math.pi)
        return float(self.log_sd * (error_term + spread_term))


@dataclass(frozen=True)
class Score:
    """Errors, rank order and calibration of modelled times. Errors are relative, without sign."""

    rows: int
    """Number of rows."""
    median_error: float
    mean_error: float
    worst_error: float
    kendall_tau: float
    """Rank correlation of published and modelled times, of the pairs without ties."""
    coverage: float
    """Share of published times in their 80 % intervals."""
    crps: float
    """Mean of `PricedRow.crps`."""
    ks: float
    """Kolmogorov-Smirnov distance from the uniform distribution. Its samples are the quantiles of
    the published times in the modelled distributions; 0 if these are right at every level."""

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, error median {self.median_error:.1%}, mean {self.mean_error:.1%}, "
            f"worst {self.worst_error:.0%}; Kendall tau {self.kendall_tau:.2f}; "
            f"{self.coverage:.0%} inside the 80 % interval, CRPS {self.crps:.3f}, "
            f"K-S distance {self.ks:.2f}"
        )


def score(priced_rows: Sequence[PricedRow]) -> Score:
    """Return the score of rows."""
    errors = np.array([abs(priced_row.error) for priced_row in priced_rows])
    published_ms = [priced_row.row.ms for priced_row in priced_rows]
    modelled_ms = [priced_row.modelled_ms for priced_row in priced_rows]
    quantiles = [norm.cdf(priced_row.deviation) for priced_row in priced_rows]
    return Score(
        rows=len(priced_rows),
        median_error=float(np.median(errors)),
        mean_error=float(errors.mean()),
        worst_error=float(errors.max()),
        kendall_tau=kendall_tau(published_ms, modelled_ms),
        coverage=float(np.mean([priced_row.inside for priced_row in priced_rows])),
        crps=float(np.mean([priced_row.crps for priced_row in priced_rows])),
        ks=float(kstest(quantiles, "uniform").statistic),
    )


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau over the pairs of positions that are tied in neither sequence.

    It is NaN if all are tied. Without ties it is the tau of Kendall (1938), with ties the gamma of
    Goodman and Kruskal (1954).
    """
    upper = np.triu_indices(len(first), 1)
    first_signs = np.sign(np.subtract.outer(first, first))[upper]
    second_signs = np.sign(np.subtract.outer(second, second))[upper]
    agreement = first_signs * second_signs  # 1: same order, -1: opposite order, 0: tied.
    return float(agreement.sum() / np.count_nonzero(agreement)) if np.any(agreement) else math.nan


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


def count_rows(classes: Mapping[str, ClassedRow], priced: Collection[str]) -> list[str]:
    """Return lines with the collected rows by part and class, and with the priced ones.

    `priced` are the ids of described rows. A network counts by its name in classes.csv, which
    sizes of one network may share.
    """
    names = get_args(RowClass)
    lines = [f"{'rows, networks':16}" + "".join(f"{name:>16}" for name in (*names, "priced"))]
    for part in (*get_args(Part), "all"):
        rows = [row for row in classes.values() if part in ("all", row.part)]
        groups = [[row for row in rows if row.row_class == name] for name in names]
        groups.append([row for row in rows if row.id in priced])
        cells = (f"{len(group)}, {len({row.network for row in group})}" for group in groups)
        lines.append(f"{part:16}" + "".join(f"{cell:>16}" for cell in cells))
    return lines


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


@contextmanager
def hold_seal(today: date, log: Path = SEAL_LOG) -> Iterator[None]:
    """Hold the log while the sealed rows are priced and their scores appended.

    Raises RunError as `check_seal` does, if another process holds the log, and if it can't be
    written, all before the block, so that no score is seen that isn't in the log.
    """
    with convert_write_errors(log), lock_file(log, wait=False) as lock:
        if lock is None:
            raise RunError(f"--seal: another process scores the sealed rows now ({log.name})")
        check_seal(today, log)
        yield


def append_scores(rows: Sequence[Mapping[str, object]], log: Path = SEAL_LOG) -> None:
    """Append a line for each row, which has a value for each of `COLUMNS`."""
    with log.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def _read_last_date(log: Path) -> date | None:
    try:
        with log.open(newline="", encoding="utf-8") as lines:
            rows = csv.DictReader(lines)
            if rows.fieldnames and tuple(rows.fieldnames) != tuple(COLUMNS):
                raise ValueError(f"columns {', '.join(rows.fieldnames)}")
            dates = [date.fromisoformat(row["date"]) for row in rows]
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{log}: not a log of scores ({error!r}); must be a CSV file with the columns "
            f"{', '.join(COLUMNS)}"
        ) from error
    return max(dates, default=None)
