"""Steps of community repositories beside the emulator's: `python -m benchmarks.community`.

The rows of community.csv were collected by others. A row is priced as the described row with its
id (`published/described.csv`). Stable Diffusion on the second generation is priced on `atlas_a2`,
as the row of the first generation with another time, ERNIE's second text as the first one with
more tokens. Rows of the sealed part aren't priced. Takes five minutes.

    python -m benchmarks.community --save benchmarks/results/community.md
"""

from __future__ import annotations

import csv
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeline.backends.ascend.cost.efficiency import load_calibration
from pipeline.backends.ascend.memory.memory_plan import GIB, MemoryPlan
from pipeline.backends.ascend.pricing.pricing import chipset
from pipeline.backends.ascend.published.scores import load_classes
from pipeline.backends.ascend.published.workloads import (
    DESCRIBED,
    DESCRIBED_LATER,
    Published,
    configure_row,
    load_published_steps,
    open_row,
)

ROWS = Path(__file__).with_name("community.csv")
CHIPS = {"910": "ascend910", "910*": "atlas_a2"}
LIKE = {"F010": "F001", "F012": "F006", "F050": "F048"}
"""Rows that aren't described themselves, and the described row of the same network."""
HEAD = (
    "row|part|network|batch x chips|published ms|modelled ms|error|"
    "80 % interval of the community|parameters and state, other memory (GiB)|memory"
)


@dataclass(frozen=True)
class PricedStepOfRow:
    """A row's step in ms, its interval as community code runs, and its memory."""

    published_ms: float
    modelled_ms: float
    low_ms: float
    high_ms: float
    memory: MemoryPlan

    @property
    def error(self) -> float:
        """Relative error of the modelled time."""
        return self.modelled_ms / self.published_ms - 1

    @property
    def inside(self) -> bool:
        """Whether the published time is in the interval."""
        return self.low_ms <= self.published_ms <= self.high_ms


def describe_row(row: Mapping[str, str]) -> Published | None:
    """Return the step of a row; None if it isn't described outside the sealed part."""
    described = {
        each.id: each
        for table in (DESCRIBED, DESCRIBED_LATER)
        for each in load_published_steps(table)
    }
    step = described.get(LIKE.get(row["id"], row["id"]))
    if step is None or load_classes()[row["id"]].part == "seal":
        return None
    pixels = step.pixels
    if row["id"] in LIKE and row["dataset"].endswith(" tokens"):
        pixels = int(row["dataset"].split(", ")[1].split()[0])
    return replace(
        step,
        id=row["id"],
        batch=int(row["batch_per_chip"]),
        pixels=pixels,
        devices=int(row["chips"]),
        ms=float(row["ms_per_step"]),
        framework=row["software"],
    )


def price_row(row: Published, chip: str) -> PricedStepOfRow:
    """Return the modelled step of a row, and its memory."""
    pricing = open_row(row, load_calibration(), chipset(chip))
    config = configure_row(row)
    step = pricing.price_step(config)
    return PricedStepOfRow(row.ms, step.step_ms, *step.interval_ms, pricing.plan_memory(config))


def format_row(row: Mapping[str, str], priced: PricedStepOfRow | None) -> list[str]:
    """Return a row of the table."""
    size = f"{row['batch_per_chip']}x{row['chips']}"
    classed = load_classes()[row["id"]]
    part = classed.part + f", {classed.row_class}" * (classed.row_class != "device")
    cells = [row["id"], part, row["network"], size, f"{float(row['ms_per_step']):.1f}"]
    if priced is None:
        return [*cells, "", "", "", "", "not priced"]
    pools = priced.memory.pools
    parameters, maps = (pools[name].used_bytes / GIB for name in ("parameters", "feature maps"))
    interval = f"{priced.low_ms:.0f} to {priced.high_ms:.0f}{'' if priced.inside else ' no'}"
    return [
        *cells,
        f"{priced.modelled_ms:.1f}",
        f"{priced.error:+.0%}",
        interval,
        f"{parameters:.1f}, {maps:.1f}",
        priced.memory.verdict,
    ]


def make_table(file: Path) -> str:
    """Return the rows of a file beside modelled times, and the errors of all."""
    table = [HEAD.split("|"), ["---"] * len(HEAD.split("|"))]
    priced_rows = []
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    for row in rows:
        step = describe_row(row)
        priced = None if step is None else price_row(step, CHIPS[row["chip"]])
        table.append(format_row(row, priced))
        if priced is not None:
            priced_rows.append(priced)
    errors = [abs(priced.error) for priced in priced_rows]
    inside = sum(priced.inside for priced in priced_rows)
    fits = sum(priced.memory.verdict != "out of memory" for priced in priced_rows)
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    return (
        f"{text}\n\n{len(errors)} of {len(rows)} rows are priced: median error "
        f"{np.median(errors):.0%}, mean {np.mean(errors):.0%}; {inside} are inside the community's "
        f"80 % interval; {fits} fit into the memory.\n"
    )


def main() -> None:
    """Print the table, or save it below the text of the results file."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, help="results file, whose table is replaced")
    arguments = parser.parse_args()
    table = make_table(ROWS)
    print(table)
    if arguments.save is not None:
        head = arguments.save.read_text(encoding="utf-8").partition("| row |")[0]
        arguments.save.write_text(head + table, encoding="utf-8")


if __name__ == "__main__":
    main()
