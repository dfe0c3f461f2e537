"""The page of imported networks of timm and transformers, from the rows that were measured.

    python -m benchmarks.foreign_page --save

It reads `results/foreign.jsonl`, whose rows `python -m benchmarks.foreign` measures, so it needs
neither torch nor the packages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.measure import RESULTS, add_save, publish, table

Package = Literal["timm", "transformers"]

COUNTS: Mapping[Package, int] = {"timm": 60, "transformers": 34}
"""Families of each package that are drawn."""
ROWS = RESULTS / "foreign.jsonl"
BOUND = 1e-5
"""Largest relative difference of the losses."""
EQUAL_IN_FLOAT64 = "rounding: the losses are equal in float64"
MOVED_IN_FLOAT64 = "rounding: in float64, as far as PyTorch's with samples moved by 1e-15"
NOT_MEASURED = "cause not measured"
UNKNOWN = "differs in float64 too, cause unknown"
CAUSES: Mapping[str, str] = {
    "timm/hgnet": "tied maxima share their gradient, and PyTorch's first has it",
}
"""Causes that `benchmarks.foreign_gradients` shows, of families drawn by seed 0."""
_TITLE = """\
# Networks of timm and transformers, imported

    python -m benchmarks.foreign --quick
    python -m benchmarks.foreign --float64 --quick --networks timm/inception_v3
    python -m benchmarks.foreign_page --save

From the same weights with the same batches: the largest difference of logits in evaluation, and of
the losses of three steps of SGD in float32, relative to PyTorch's. A cause is named if it was
measured: both in float64, beside PyTorch with samples moved by 1e-15 of their values, or the
gradients of single batches ([decisions][causes]).

[causes]: ../../docs/decisions.md#a-difference-to-pytorch-is-rounding-if-float64-has-none

"""


@dataclass(frozen=True)
class Comparison:
    """Figures of one network; `refusal` is why it isn't imported."""

    package: str
    family: str
    variant: str = ""
    shape: tuple[int, ...] = ()
    parameters: int = 0
    nodes: int = 0
    logits: float = float("nan")
    losses: float = float("nan")
    torch_losses: float = float("nan")
    wide_losses: float = float("nan")
    """The largest relative difference of the losses if both compute in float64."""
    moved_losses: float = float("nan")
    """The same of PyTorch's losses in float64 to those with samples moved by 1e-15."""
    import_s: float = float("nan")
    compile_s: float = float("nan")
    refusal: str = ""
    conditions: str = ""
    """Day, machine, versions and options of the run."""

    @property
    def name(self) -> str:
        """Package and family, as `timm/beit`."""
        return f"{self.package}/{self.family}"

    @property
    def is_equal(self) -> bool:
        """Whether the losses are PyTorch's."""
        return self.losses <= BOUND

    @property
    def cause(self) -> str:
        """Why the losses aren't PyTorch's, as far as it was measured; empty if they are."""
        if self.refusal or self.is_equal:
            return self.refusal.replace("|", "/")
        if self.wide_losses <= BOUND:
            return EQUAL_IN_FLOAT64
        if self.wide_losses <= 4 * self.moved_losses:
            return MOVED_IN_FLOAT64
        if self.name in CAUSES:
            return CAUSES[self.name]
        return NOT_MEASURED if np.isnan(self.wide_losses) else UNKNOWN

    def make_row(self) -> list[str]:
        """Return the figures as a row of the table."""
        return [
            self.name,
            self.variant,
            "x".join(map(str, self.shape)),
            f"{self.parameters / 1e6:.2f}",
            f"{self.nodes:,}",
            f"{self.logits:.1e}",
            f"{self.losses:.1e}",
            f"{self.torch_losses:.1e}",
            *("" if np.isnan(x) else f"{x:.1e}" for x in (self.wide_losses, self.moved_losses)),
            f"{self.import_s:.1f}",
            f"{self.compile_s:.1f}",
            self.cause,
        ]


def main() -> None:
    """Print the page, and save it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS, help="default: %(default)s")
    add_save(parser, "foreign.md")
    args = parser.parse_args()
    publish(format_page(read_rows(args.rows).values()), args.save)


def read_rows(path: Path) -> dict[str, Comparison]:
    """Return the comparisons of earlier runs by name."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [Comparison(**json.loads(line)) for line in lines]
    return {row.name: row for row in rows}


def write_row(path: Path, row: Comparison) -> None:
    """Append a comparison to a file, where it replaces the former of its name for `read_rows`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def format_page(comparisons: Iterable[Comparison]) -> str:
    """Return the page of results, a function of the comparisons alone."""
    rows = sorted(comparisons, key=lambda row: row.name)
    text = f"{_TITLE}Losses within {BOUND:.0e} of PyTorch's, in float32:\n\n"
    for package, total in COUNTS.items():
        text += _format_counts(package, total, [row for row in rows if row.package == package])
    header = ["network", "variant", "sample", "parameters, M", "nodes", "logits", "losses"]
    header += ["PyTorch float32 to float64", "losses in float64", "moved by 1e-15"]
    header += ["import, CPU s", "compile, CPU s", "cause"]
    text += f"\n{table(header, [row.make_row() for row in rows])}\nConditions of the runs:\n\n"
    for conditions in sorted({row.conditions for row in rows}):
        members = [row for row in rows if row.conditions == conditions]
        text += f"* {conditions}: {_list_names(members)}\n"
    return text


def _format_counts(package: str, total: int, rows: Sequence[Comparison]) -> str:
    """Return how many families are equal, and of the others those of each cause."""
    equal = sum(row.is_equal for row in rows)
    text = f"* {package}: {equal} of {total} families.\n"
    differing = [row for row in rows if not row.is_equal and not row.refusal]
    for cause in sorted({row.cause for row in differing}):
        members = [row for row in differing if row.cause == cause]
        text += f"  * {len(members)} further, {cause}: {_list_names(members)}\n"
    if refused := [row for row in rows if row.refusal]:
        names = _list_names(refused)
        text += f"  * {len(refused)} not compared, for the reason in the table: {names}\n"
    if len(rows) < total:
        text += f"  * {total - len(rows)} not run.\n"
    return text


def _list_names(rows: Iterable[Comparison]) -> str:
    return f"{', '.join(f'`{row.name}`' for row in rows)}."


if __name__ == "__main__":
    main()
