"""Steps of community repositories beside the emulator's: `python -m benchmarks.community`.

The rows of community.csv were collected by others, and no fit or choice of the model saw them. A
row whose network isn't shipped isn't priced. IBN-ResNet-50 is priced as ResNet-50, whose batch norm
replaces its instance norm.

    python -m benchmarks.community --save benchmarks/results/community.md
"""

from __future__ import annotations

import csv
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.pricing.traced_step import TracedStep
from pipeline.backends.ascend.published.workloads import (
    ADAMW,
    describe_input,
    load_model_spec,
    trace_image_step,
    trace_network,
)

ROWS = Path(__file__).with_name("community.csv")
ERNIE_WORDS = 18_000
"""Tokens of ERNIE 1.0, which has the layers of BERT base."""


def trace_classifier(batch: int, tokens: int) -> TracedStep:
    """Return a step of BERT base with ERNIE's vocabulary on texts of `tokens` tokens."""
    spec = load_model_spec("bert_base").model_copy(update={"vocabulary": ERNIE_WORDS})
    return trace_network(spec, batch, describe_input((tokens,), "int32"), 2, ADAMW)


def trace_row(row: Mapping[str, str]) -> tuple[TracedStep, str] | None:
    """Return the step of a row and the shipped network; None if its network isn't shipped."""
    batch = int(row["batch_per_chip"])
    if row["network"].startswith("ERNIE"):
        tokens = int(row["dataset"].split(", ")[1].split()[0])
        return trace_classifier(batch, tokens), "bert_base"
    if row["network"].startswith("IBN-ResNet-50"):
        return trace_image_step("resnet50", batch, 224, 1000), "resnet50, without instance norm"
    return None


def compare_row(row: Mapping[str, str]) -> tuple[list[str], float | None]:
    """Return a row of the table, and the relative error of the modelled time."""
    cells = [row["id"], row["network"], f"{row['batch_per_chip']}x{row['chips']}", row["precision"]]
    cells.append(f"{float(row['ms_per_step']):.1f}")
    traced = trace_row(row) if row["chip"] == "910" else None
    if traced is None:
        return [*cells, "", "", "", "not shipped"], None
    step, network = traced
    config = ExecutionConfig(
        cast(Any, row["precision"]),
        cast(Any, row["mode"]),
        sink_size=1000,
        devices=int(row["chips"]),
    )
    priced = Pricing(step, chipset("ascend910")).price_step(config)
    low, high = priced.table_interval_ms
    error = priced.step_ms / float(row["ms_per_step"]) - 1
    interval = f"{low:.1f} to {high:.1f}{'' if low <= float(row['ms_per_step']) <= high else ' no'}"
    return [*cells, f"{priced.step_ms:.1f}", f"{error:+.0%}", interval, network], error


def make_table(file: Path) -> str:
    """Return the rows of a file beside modelled times, and the median of the errors."""
    with file.open(newline="", encoding="utf-8") as lines:
        results = [compare_row(row) for row in csv.DictReader(lines)]
    head = "row|network|batch x chips|precision|published ms|modelled ms|error|80 % interval|as"
    table = [head.split("|"), ["---"] * 9, *(cells for cells, _ in results)]
    errors = [abs(error) for _, error in results if error is not None]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    return (
        f"{text}\n\n{len(errors)} of {len(results)} rows have a shipped network; their median "
        f"error is {np.median(errors):.0%}.\n"
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
