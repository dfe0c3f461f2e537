"""Prices of published steps: by one calibration, and by fits that leave a family out."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from pipeline.backends.ascend.chip.hardware import PricedChip
from pipeline.backends.ascend.chip.options import ExecutionConfig, Software
from pipeline.backends.ascend.cost.calibration import GROUPS, Calibration, calibrate_with
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.published.workloads import Published, traced
from pipeline.backends.ascend.report.priced_step import PricedStep

LEFT_OUT_FILE = Path(__file__).with_name("left_out.csv")
"""Calibrations by the rows of all other families, one for each family."""


def load_left_out() -> Mapping[str, Calibration]:
    """Return the calibrations of left_out.csv by the family that they leave out."""
    with LEFT_OUT_FILE.open(newline="", encoding="utf-8") as lines:
        return {
            row["family"]: calibrate_with(
                {group: float(row[group]) for group in GROUPS},
                float(row["task_us"]),
                float(row["log_sd"]),
                float(row["interval_scale"]),
            )
            for row in csv.DictReader(lines)
        }


def config_of(row: Published) -> ExecutionConfig:
    """Return the options that a published row was run with."""
    return ExecutionConfig(
        row.precision,
        row.mode,
        1000,
        row.devices,
        row.fusion,
        software=software_of(row),
        keep_batchnorm_fp32=row.keep_batchnorm_fp32 and row.precision == "O2",
    )


def software_of(row: Published) -> Software:
    """Return the stack of a published row: TensorFlow's graphs are compiled by the same engine."""
    if row.mode != "op_by_op":
        return "mindspore_graph"
    return "pytorch_eager" if row.framework.startswith("PyTorch") else "mindspore_eager"


def price_row(
    row: Published, calibration: Calibration, chip: PricedChip | None = None
) -> PricedStep:
    """Return the modelled step of a row."""
    chip = chip or chipset("ascend910")
    pricing = Pricing(traced(row), chip, calibration)
    if row.op_launch_us is not None:
        pricing = pricing.on(op_launch_us=row.op_launch_us, pytorch_op_launch_us=row.op_launch_us)
    return pricing.step(config_of(row))
