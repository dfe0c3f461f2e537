"""Compare published with modelled steps: `python -m pipeline.backends.ascend.validate [FILE]`.

    python -m pipeline.backends.ascend.validate --row MS0042     # the kernels of a row by class
    python -m pipeline.backends.ascend.validate FILE --chip atlas_a2

Every row is priced with parameters that are fitted to the rows of other families. Rows that the
host may have limited are only upper bounds of the device's time. With a FILE, the steps in the file
are compared instead, with the package's calibration.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from scipy.stats import kstest, norm

from pipeline.backends.ascend.chip.hardware import PricedChip
from pipeline.backends.ascend.cost.efficiency import Calibration, load_calibration
from pipeline.backends.ascend.pricing.pricing import chipset
from pipeline.backends.ascend.published.workloads import (
    ATLAS_A2,
    PUBLISHED,
    Published,
    load_left_out,
    load_published_steps,
    price_row,
)
from pipeline.backends.ascend.report.priced_step import NORMAL_90
from pipeline.core.errors import PipelineError, RunError

HARD_FAMILIES = {
    "depthwise networks, both": ("mobilenet", "efficientnet", "shufflenet"),
    "vision transformers, both": ("transformer",),
}
"""Groups of families with the largest errors, which are also scored separately."""


@dataclass(frozen=True)
class Verdict:
    """A published row, and its modelled time and 80 % interval."""

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
        """Standard deviation of the log of the modelled time, whose interval is 80 % of it."""
        return math.log(self.high_ms / self.low_ms) / (2 * NORMAL_90)

    @property
    def deviation(self) -> float:
        """Log of published / modelled time, in standard deviations."""
        return -math.log1p(self.error) / self.log_sd

    @property
    def crps(self) -> float:
        """Continuous ranked probability score of the log of the published time.

        For a normal distribution it has a closed form (Gneiting and Raftery 2007, section 4.2). For
        a distribution without spread it is the absolute error of the log.
        """
        z = self.deviation
        density = 2 * norm.pdf(z) - 1 / math.sqrt(math.pi)
        return float(self.log_sd * (z * (2 * norm.cdf(z) - 1) + density))


@dataclass(frozen=True)
class Score:
    """Errors, rank order and coverage of some rows: the share of published times in intervals.

    `crps` is the mean score of the modelled distributions of the log of the time. `ks` is the
    Kolmogorov-Smirnov distance of the published times' quantiles in them to uniform ones: 0 if the
    distributions are right at all levels, not only at 80 %.
    """

    rows: int
    median_error: float
    mean_error: float
    worst_error: float
    kendall_tau: float
    coverage: float
    crps: float
    ks: float

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, error median {self.median_error:.1%}, mean {self.mean_error:.1%}, "
            f"worst {self.worst_error:.0%}; Kendall tau {self.kendall_tau:.2f}; "
            f"{self.coverage:.0%} inside the 80 % interval, CRPS {self.crps:.3f}, "
            f"K-S distance {self.ks:.2f}"
        )


def validate(rows: Sequence[Published]) -> tuple[Verdict, ...]:
    """Price every row with the calibration that leaves its family out."""
    calibrations = load_left_out()
    return tuple(_price_verdict(row, calibrations[row.family]) for row in rows)


def score(verdicts: Sequence[Verdict]) -> Score:
    """Return errors, order and coverage of rows."""
    errors = np.array([abs(verdict.error) for verdict in verdicts])
    return Score(
        len(verdicts),
        float(np.median(errors)),
        float(errors.mean()),
        float(errors.max()),
        kendall_tau(
            [verdict.row.ms for verdict in verdicts], [verdict.modelled_ms for verdict in verdicts]
        ),
        float(np.mean([verdict.inside for verdict in verdicts])),
        float(np.mean([verdict.crps for verdict in verdicts])),
        float(kstest([norm.cdf(verdict.deviation) for verdict in verdicts], "uniform").statistic),
    )


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau over pairs that are tied in neither sequence (Kendall 1938)."""
    upper = np.triu_indices(len(first), 1)
    first_signs = np.sign(np.subtract.outer(first, first))[upper]
    second_signs = np.sign(np.subtract.outer(second, second))[upper]
    order = first_signs * second_signs
    return float(order.sum() / np.count_nonzero(order)) if np.any(order) else math.nan


def compute_pair_ratios(verdicts: Sequence[Verdict]) -> list[tuple[str, float, float]]:
    """Return (name, published ratio, modelled ratio) of networks with rows in two launch modes.

    A ratio is the op-by-op time relative to graph mode.
    """
    pairs = [verdict for verdict in verdicts if verdict.row.quality == "pair"]
    ratios = []
    for name in dict.fromkeys(verdict.row.model for verdict in pairs):
        by_mode = {verdict.row.mode: verdict for verdict in pairs if verdict.row.model == name}
        eager = by_mode["op_by_op"]
        graph = by_mode["loop_sink"]
        ratios.append((name, eager.row.ms / graph.row.ms, eager.modelled_ms / graph.modelled_ms))
    return ratios


def _print_table(verdicts: Sequence[Verdict]) -> None:
    print(
        f"{'id':7} {'network':22} {'batch':>6} {'dev.':>5} {'mode':10} {'published':>10} "
        f"{'modelled':>9} {'error':>7}  80 % interval"
    )
    for verdict in verdicts:
        row = verdict.row
        bound = "<=" if row.quality == "at_most" else "  "
        note = "" if verdict.inside or row.quality == "at_most" else "  outside"
        note += f"  ({row.suspicion})" if row.suspicion else ""
        print(
            f"{row.id:7} {row.model:22} {row.batch:6d} {row.devices:5d} {row.mode:10} "
            f"{bound}{row.ms:8.2f} {verdict.modelled_ms:9.2f} {verdict.error:+7.0%}  "
            f"[{verdict.low_ms:.2f}, {verdict.high_ms:.2f}]{note}"
        )


def price_file(file: Path, chip: str = "ascend910") -> tuple[Verdict, ...]:
    """Price the steps of a CSV file in the form of published.csv, with the package's calibration.

    Raises RunError for a file that isn't such a table, ChipError for an unknown chip.
    """
    priced_chip = chipset(chip)
    try:
        rows = load_published_steps(file)
        return tuple(_price_verdict(row, load_calibration(), priced_chip) for row in rows)
    except (OSError, UnicodeError, KeyError, ValueError, TypeError) as error:
        columns = ", ".join(field.name for field in fields(Published))
        raise RunError(
            f"{file}: not a table of steps ({error}); must be a CSV file with the columns "
            f"{columns}, such as {PUBLISHED.name} of this package"
        ) from error


def _price_verdict(
    row: Published, calibration: Calibration, chip: PricedChip | None = None
) -> Verdict:
    step = price_row(row, calibration, chip)
    return Verdict(row, step.step_ms, *step.interval_ms)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and scores of published steps, a table of other steps, or a row's kernels."""
    parser = ArgumentParser(prog="python -m pipeline.backends.ascend.validate")
    parser.add_argument("file", nargs="?", type=Path, help="your own steps, as in published.csv")
    parser.add_argument("--row", metavar="ID", help="print the kernels of one row by class instead")
    parser.add_argument("--chip", default="ascend910", help="the chip of the file's steps")
    options = parser.parse_args(arguments)
    file: Path | None = options.file
    try:
        if options.row is not None:
            print("\n".join(describe_row(options.row, file or PUBLISHED)))
        elif file is None:
            _print_published()
        else:
            _print_table(price_file(file, options.chip))
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def describe_row(row_id: str, file: Path) -> Iterator[str]:
    """Yield lines with the kernels of a row by class, with the package's calibration.

    Raises RunError if the file doesn't have the row.
    """
    rows = {row.id: row for row in load_published_steps(file)}
    if row_id not in rows:
        raise RunError(f"--row {row_id}: must be a row of {file.name}: {', '.join(rows)}")
    row = rows[row_id]
    step = price_row(row, load_calibration())
    kernels: Counter[str] = Counter()
    class_ms: dict[str, float] = {}
    for task in step.tasks:
        class_ms[task.cost_class] = class_ms.get(task.cost_class, 0.0) + task.us / 1e3
        kernels[task.cost_class] += task.repeat
    yield f"{row.id} {row.model}: published {row.ms:.2f} ms, modelled {step.step_ms:.2f}"
    for name, ms in sorted(class_ms.items(), key=lambda entry: -entry[1]):
        yield f"  {name:22} {ms:9.2f} ms in {kernels[name]} kernels"


def _print_published() -> None:
    verdicts = validate(load_published_steps())
    _print_table(verdicts)
    measured = [verdict for verdict in verdicts if verdict.row.quality == "device"]
    graph = [verdict for verdict in measured if verdict.row.mode != "op_by_op"]
    eager = [verdict for verdict in measured if verdict.row.mode == "op_by_op"]
    bounds = [verdict for verdict in verdicts if verdict.row.quality == "at_most"]
    fast_enough = sum(verdict.error <= 0.1 for verdict in bounds)
    print()
    print(f"graph mode, device-bound, family left out: {score(graph)}")
    print(f"eager PyTorch, 80 us an op: {score(eager)}")
    for title, families in HARD_FAMILIES.items():
        hard = [verdict for verdict in (*graph, *eager) if verdict.row.family in families]
        print(f"{title}: {score(hard)}")
    print(f"rows bounded by the host: {fast_enough} of {len(bounds)} kept, within 10 %")
    for name, published, modelled in compute_pair_ratios(verdicts):
        print(f"eager against graph, {name}: published {published:.2f}, modelled {modelled:.2f}")
    print("\nAtlas A2, of which no kernel and no step is in the fit:")
    _print_table(price_file(ATLAS_A2, "atlas_a2"))


if __name__ == "__main__":
    sys.exit(main())
