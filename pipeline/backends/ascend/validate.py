"""Compare published with modelled steps: `python -m pipeline.backends.ascend.validate`.

    python -m pipeline.backends.ascend.validate --row F001       # a row's kernels, and its memory
    python -m pipeline.backends.ascend.validate FILE --chip atlas_a2
    python -m pipeline.backends.ascend.validate --count          # rows by class; prices none
    python -m pipeline.backends.ascend.validate --plot coverage.svg
    python -m pipeline.backends.ascend.validate --seal           # scores alone, once in seven days
    python -m pipeline.backends.ascend.validate --calibrate MINE.csv     # a chip's file, MINE.yaml

Each published row is priced with a calibration that is fitted to all other families of networks. If
the host may have been slower than the device, the published time is an upper bound of the device's
time. FILE is a table of steps to compare instead, with the package's calibration.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from datetime import date
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

from pipeline.backends.ascend.calibrate import calibrate_chip
from pipeline.backends.ascend.chip.hardware import PricedChip
from pipeline.backends.ascend.cost.efficiency import (
    Calibration,
    load_calibration,
    load_populations,
)
from pipeline.backends.ascend.memory.memory_plan import GIB
from pipeline.backends.ascend.pricing.pricing import chipset
from pipeline.backends.ascend.published.scores import (
    COLUMNS,
    SEAL_LOG,
    ClassedRow,
    PricedRow,
    Score,
    append_scores,
    count_rows,
    draw_coverage,
    hold_seal,
    load_classes,
    score,
)
from pipeline.backends.ascend.published.workloads import (
    ATLAS_A2,
    DESCRIBED,
    DESCRIBED_LATER,
    PUBLISHED,
    SEALED,
    Published,
    configure_row,
    load_left_out,
    load_published_steps,
    open_row,
    price_row,
    require_pixels,
)
from pipeline.core.errors import PipelineError, RunError, UsageError
from pipeline.core.files.atomic_write import convert_write_errors, write_whole

OPEN_TABLES = (PUBLISHED, DESCRIBED, DESCRIBED_LATER, ATLAS_A2)
"""Tables whose rows may be seen."""
DEFAULT_CHIP = "ascend910"
HARD_FAMILIES = {
    "depthwise networks, graph and eager": ("mobilenet", "efficientnet", "shufflenet"),
    "vision transformers, graph and eager": ("transformer",),
}
"""Families by group. These groups have the largest errors, so each also has a score of its own."""


def validate(rows: Sequence[Published]) -> tuple[PricedRow, ...]:
    """Price each row with the calibration whose fit left out the row's family."""
    calibrations = load_left_out()
    return tuple(_price_with_interval(row, calibrations[row.family]) for row in rows)


def price_rows(rows: Sequence[Published], chip: PricedChip | None = None) -> tuple[PricedRow, ...]:
    """Price rows with the package's calibration, with the interval of published.csv."""
    return tuple(_price_with_interval(row, load_calibration(), chip) for row in rows)


def compute_pair_ratios(priced_rows: Sequence[PricedRow]) -> list[tuple[str, float, float]]:
    """Return (name, published ratio, modelled ratio) of networks with rows in two modes.

    A ratio is eager (op-by-op) time / time in graph mode.
    """
    pairs = [priced_row for priced_row in priced_rows if priced_row.row.quality == "pair"]
    ratios = []
    for name in dict.fromkeys(priced_row.row.model for priced_row in pairs):
        by_mode = {
            priced_row.row.mode: priced_row for priced_row in pairs if priced_row.row.model == name
        }
        eager = by_mode["op_by_op"]
        graph = by_mode["loop_sink"]
        ratios.append((name, eager.row.ms / graph.row.ms, eager.modelled_ms / graph.modelled_ms))
    return ratios


def _print_table(priced_rows: Sequence[PricedRow]) -> None:
    print(
        f"{'id':7} {'network':22} {'batch':>6} {'dev.':>5} {'mode':10} {'published':>10} "
        f"{'modelled':>9} {'error':>7}  80 % interval"
    )
    for priced_row in priced_rows:
        row = priced_row.row
        bound = "<=" if row.quality == "at_most" else "  "
        note = "" if priced_row.inside or row.quality == "at_most" else "  outside"
        note += f"  ({row.suspicion})" if row.suspicion else ""
        print(
            f"{row.id:7} {row.model:22} {row.batch:6d} {row.devices:5d} {row.mode:10} "
            f"{bound}{row.ms:8.2f} {priced_row.modelled_ms:9.2f} {priced_row.error:+7.0%}  "
            f"[{priced_row.low_ms:.2f}, {priced_row.high_ms:.2f}]{note}"
        )


def price_file(file: Path, chip: str = DEFAULT_CHIP, jobs: int = 1) -> tuple[PricedRow, ...]:
    """Price the steps of a CSV file in the form of published.csv, with the package's calibration.

    With several `jobs` as many processes price them.

    Raises RunError for a file that isn't such a table, ChipError for an unknown chip.
    """
    priced_chip = chipset(chip)
    rows = _load_rows(file)
    with _refusing_other_tables(file):
        if jobs == 1:
            return price_rows(rows, priced_chip)
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            parts = pool.map(price_rows, [[row] for row in rows], [priced_chip] * len(rows))
            return tuple(chain.from_iterable(parts))


def _load_rows(file: Path) -> Sequence[Published]:
    """Load a table of steps. Raises RunError if it isn't one, or a step has other pixels than its
    network."""
    with _refusing_other_tables(file):
        rows = load_published_steps(file)
    for row in rows:
        try:
            require_pixels(row)
        except ValueError as error:
            raise RunError(f"{file}, {row.id}: {error}") from error
    return rows


@contextmanager
def _refusing_other_tables(file: Path) -> Iterator[None]:
    """Raise RunError for an error of a file that isn't a table of steps."""
    try:
        yield
    except (OSError, UnicodeError, ValueError, TypeError) as error:
        columns = ", ".join(field.name for field in fields(Published))
        raise RunError(
            f"{file}: not a table of steps ({error}); must be a CSV file with the columns "
            f"{columns}, such as {PUBLISHED.name} of this package"
        ) from error


def set_population_intervals(
    priced_rows: Sequence[PricedRow], classes: Mapping[str, ClassedRow]
) -> tuple[PricedRow, ...]:
    """Return rows with the interval of their population's code. Modelled times stay as they are.

    Its centre is nearer to the published times of `fit`, but not of `look`
    (benchmarks/results/ascend_populations.md).
    """
    by_name = load_populations().by_name
    changed = []
    for priced_row in priced_rows:
        population = by_name[classes[priced_row.row.id].population]
        eager = priced_row.row.mode == "op_by_op"
        low, high = population.interval_ms(priced_row.modelled_ms, eager=eager)
        changed.append(replace(priced_row, low_ms=low, high_ms=high))
    return tuple(changed)


def group_by_part(
    priced_rows: Sequence[PricedRow], classes: Mapping[str, ClassedRow]
) -> Mapping[str, list[PricedRow]]:
    """Return rows by part, by part and population, and by part, population and kind of mode."""
    groups: dict[str, list[PricedRow]] = {}
    for priced_row in priced_rows:
        row = classes[priced_row.row.id]
        mode = "eager" if priced_row.row.mode == "op_by_op" else "graph"
        for name in (
            row.part,
            f"{row.part}, {row.population}",
            f"{row.part}, {row.population}, {mode}",
        ):
            groups.setdefault(name, []).append(priced_row)
    return dict(sorted(groups.items()))


def score_sealed(
    table: Path = SEALED,
    log: Path = SEAL_LOG,
    *,
    today: date,
    commit: str,
    classes: Mapping[str, ClassedRow] | None = None,
    jobs: int = 1,
) -> Mapping[str, Score]:
    """Return the scores of the sealed rows by group, and log them with date and commit.

    Raises RunError if the log has a score of the last seven days, is held by another process or
    can't be written; no row is priced then.
    """
    with hold_seal(today, log):
        classes = classes or load_classes()
        scores = _score_population_times(price_file(table, jobs=jobs), classes)
        append_scores([_make_log_row(today, commit, *entry) for entry in scores.items()], log)
    return scores


def _make_log_row(today: date, commit: str, group: str, score: Score) -> dict[str, object]:
    tried = load_populations().fits_tried
    figures = {name: round(value, 4) for name, value in asdict(score).items() if name in COLUMNS}
    return {"date": today, "commit": commit, "fits_tried": tried, "group": group, **figures}


def _read_commit() -> str:
    """Return the commit of this package's checkout, with `+` if files of the package differ."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError) as error:
        raise RunError(
            f"--seal: {folder} isn't in a git checkout, so the score would have no commit; must be "
            "run from one"
        ) from error


def _print_parts(plot: Path | None) -> None:
    print("\nNetworks described after the calibration, which reads none of these rows:")
    classes = load_classes()
    priced_rows = (*price_file(DESCRIBED), *price_file(DESCRIBED_LATER))
    _print_table(priced_rows)
    print("\nwith the interval of published.csv:")
    _print_scores(_score_groups(priced_rows, classes))
    print("\nwith the interval of the population, fitted to the rows of `fit`:")
    _print_scores(_score_population_times(priced_rows, classes))
    if plot is not None:
        with_intervals = set_population_intervals(priced_rows, classes)
        by_part = group_by_part(with_intervals, classes)
        parts = {name: by_part[name] for name in ("fit", "look")}
        chart = draw_coverage({n: [row.deviation for row in rows] for n, rows in parts.items()})
        with convert_write_errors(plot):
            write_whole(plot, chart.to_file_text())


def set_expected_times(
    priced_rows: Sequence[PricedRow], classes: Mapping[str, ClassedRow]
) -> tuple[PricedRow, ...]:
    """Return rows with the time that their population's fit expects, in place of the modelled."""
    by_name = load_populations().by_name
    changed = []
    for priced_row in priced_rows:
        population = by_name[classes[priced_row.row.id].population]
        eager = priced_row.row.mode == "op_by_op"
        expected_ms = population.expected_ms(priced_row.modelled_ms, eager=eager)
        changed.append(replace(priced_row, modelled_ms=expected_ms))
    return tuple(changed)


def _score_population_times(
    priced_rows: Sequence[PricedRow], classes: Mapping[str, ClassedRow]
) -> Mapping[str, Score]:
    """Return scores with the populations' intervals, of modelled and then of expected times."""
    rows = set_population_intervals(priced_rows, classes)
    expected = _score_groups(set_expected_times(rows, classes), classes)
    return {
        **_score_groups(rows, classes),
        **{f"{name}: expected time": group_score for name, group_score in expected.items()},
    }


def _score_groups(
    priced_rows: Sequence[PricedRow], classes: Mapping[str, ClassedRow]
) -> Mapping[str, Score]:
    return {name: score(rows) for name, rows in group_by_part(priced_rows, classes).items()}


def _print_scores(scores: Mapping[str, Score]) -> None:
    for name, group_score in scores.items():
        print(f"{name}: {group_score}")


def _price_with_interval(
    row: Published, calibration: Calibration, chip: PricedChip | None = None
) -> PricedRow:
    step = price_row(row, calibration, chip)
    return PricedRow(row, step.step_ms, *step.table_interval_ms)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the published steps and their scores, the steps of a file, or the kernels of a row."""
    parser = ArgumentParser(prog="python -m pipeline.backends.ascend.validate")
    parser.add_argument(
        "file", nargs="?", type=Path, help="your own steps, in the form of published.csv"
    )
    parser.add_argument("--row", metavar="ID", help="print only this row's kernels and memory")
    parser.add_argument(
        "--chip", help=f"the chip of the file's or the row's steps; default {DEFAULT_CHIP}"
    )
    parser.add_argument(
        "--count", action="store_true", help="print how many rows have which class; price none"
    )
    parser.add_argument(
        "--seal", action="store_true", help="score the sealed rows, and write the scores to the log"
    )
    parser.add_argument(
        "--plot", metavar="SVG", type=Path, help="write observed by nominal coverage of both parts"
    )
    parser.add_argument(
        "--calibrate", metavar="CSV", type=Path, help="make a chip's file from your measured steps"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, choices=range(1, 65), metavar="N", help="processes of --seal"
    )
    options = parser.parse_args(arguments)
    file: Path | None = options.file
    try:
        if file is not None and file.resolve() == SEALED.resolve():
            raise RunError(f"{file}: its rows stay unseen; must be scored by --seal")
        if options.count:
            if len(arguments if arguments is not None else sys.argv[1:]) > 1:
                raise UsageError(["--count"], "must be the only option")
            print("\n".join(count_described_rows()))
            return 0
        if options.plot is not None:
            _check_plot(options)
        if options.calibrate is not None:
            if file is not None or options.row is not None or options.seal or options.plot:
                raise UsageError(["--calibrate"], "must be without FILE, --row, --seal and --plot")
            print(calibrate_chip(options.calibrate, options.chip or DEFAULT_CHIP))
        elif options.seal:
            if file is not None or options.row is not None:
                rule = "scores the sealed rows; must be without FILE and --row"
                raise UsageError(["--seal"], rule)
            scores = score_sealed(today=date.today(), commit=_read_commit(), jobs=options.jobs)
            _print_scores(scores)
        elif options.row is not None:
            files = OPEN_TABLES if file is None else (file,)
            print("\n".join(describe_row(options.row, files, options.chip)))
        elif file is None:
            _print_published(options.plot)
        else:
            _print_table(price_file(file, options.chip or DEFAULT_CHIP))
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def count_described_rows() -> Iterator[str]:
    """Yield lines with the collected and the described rows by part, of which none is priced."""
    tables = (PUBLISHED, DESCRIBED, DESCRIBED_LATER, SEALED)
    rows = [row for table in tables for row in load_published_steps(table)]
    yield from count_rows(load_classes(), {row.id for row in rows})
    networks = len({row.model for row in rows})
    yield f"{len(rows)} rows of {networks} networks, sizes apart, can be priced"


def _check_plot(options: Namespace) -> None:
    """Raise RunError if a chart can't be written, before ten minutes of pricing; UsageError beside
    other options."""
    if options.seal or options.row is not None or options.file is not None:
        rule = "is of the package's rows; must be without FILE, --row and --seal"
        raise UsageError(["--plot"], rule)
    folder: Path = options.plot.parent
    if not folder.is_dir():
        raise RunError(f"--plot {options.plot}: there is no folder {folder}; must be in a folder")
    if options.plot.is_dir() or not os.access(folder, os.W_OK):
        raise RunError(f"--plot {options.plot}: can't be written; must be a file's path")


def describe_row(row_id: str, files: Sequence[Path], chip: str | None) -> Iterator[str]:
    """Yield lines with the times of a row's kernels by class, with the package's calibration, and
    with its memory. `chip` is None for the chip of the table.

    Raises RunError if no file has the row, ChipError for an unknown chip.
    """
    rows = {row.id: (row, file) for file in files for row in _load_rows(file)}
    if row_id not in rows:
        names = ", ".join(file.name for file in files)
        raise RunError(f"--row {row_id}: must be a row of {names}: {', '.join(rows)}")
    row, file = rows[row_id]
    config = configure_row(row)
    chip = chip or ("atlas_a2" if file == ATLAS_A2 else DEFAULT_CHIP)
    pricing = open_row(row, load_calibration(), chipset(chip))
    step = pricing.price_step(config)
    kernels: Counter[str] = Counter()
    class_ms: dict[str, float] = {}
    for cost in step.tasks:
        name: str = cost.task.cost_class
        class_ms[name] = class_ms.get(name, 0.0) + cost.us / 1e3
        kernels[name] += cost.task.repeat
    yield f"{row.id} {row.model}: published {row.ms:.2f} ms, modelled {step.step_ms:.2f}"
    for name, ms in sorted(class_ms.items(), key=lambda entry: -entry[1]):
        yield f"  {name:22} {ms:9.2f} ms in {kernels[name]} kernels"
    memory = pricing.plan_memory(config)
    pools = ", ".join(
        f"{name} {pool.used_bytes / GIB:.1f} of {pool.limit_bytes / GIB:.0f}"
        for name, pool in memory.pools.items()
    )
    yield f"memory: {memory.verdict}; in GiB: {pools}"


def _print_published(plot: Path | None) -> None:
    priced_rows = validate(load_published_steps())
    _print_table(priced_rows)
    measured = [priced_row for priced_row in priced_rows if priced_row.row.quality == "device"]
    graph = [priced_row for priced_row in measured if priced_row.row.mode != "op_by_op"]
    eager = [priced_row for priced_row in measured if priced_row.row.mode == "op_by_op"]
    bounds = [priced_row for priced_row in priced_rows if priced_row.row.quality == "at_most"]
    num_within_bound = sum(priced_row.error <= 0.1 for priced_row in bounds)
    print()
    print(f"graph mode, device-bound, family left out: {score(graph)}")
    print(f"eager PyTorch, launches of 80 us an op, family left out: {score(eager)}")
    for title, families in HARD_FAMILIES.items():
        hard = [priced_row for priced_row in (*graph, *eager) if priced_row.row.family in families]
        print(f"{title}: {score(hard)}")
    counts = f"{num_within_bound} of {len(bounds)}"
    print(f"upper bounds: {counts} modelled times are at most 10 % above the published time")
    for name, published, modelled in compute_pair_ratios(priced_rows):
        print(f"eager against graph, {name}: published {published:.2f}, modelled {modelled:.2f}")
    print("\nAtlas A2; the fit uses none of its kernels or steps:")
    _print_table(price_file(ATLAS_A2, "atlas_a2"))
    _print_parts(plot)


if __name__ == "__main__":
    sys.exit(main())
