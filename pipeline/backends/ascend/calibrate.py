"""A chip's file from a user's measured steps: `validate --calibrate MINE.csv`.

A factor makes the device slower or faster, so that the median step takes as long as measured. The
host, the links and the memory stay those of the chip.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

from pipeline.backends.ascend.chip.hardware import Hardware, PricedChip
from pipeline.backends.ascend.cost.efficiency import NORMAL_90, load_calibration, load_populations
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.published.workloads import (
    Published,
    configure_row,
    parse_row,
    require_pixels,
    trace_row,
)
from pipeline.core.errors import PipelineError, RunError, first_line, printable
from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.files.name_text import find_nearest
from pipeline.core.files.paths import CONF
from pipeline.core.files.value_text import count_noun, show

SPEEDS = (
    "ai_core_clock_mhz",
    "fp32_matmul_gmacs_per_s",
    "hbm_nominal_gb_per_s",
    "hbm_sustained_gb_per_s",
)
"""Figures of the device that a factor divides; rates by cycle follow the clock."""
TIMES = ("task_gap_us", "task_floor_one_core_us", "task_floor_all_cores_us", "ai_cpu_task_us")
"""Figures of the device that a factor multiplies."""
MIN_ROWS = 3
MAX_FACTOR = 10.0
"""Largest plausible factor, or its inverse; other units than milliseconds are beyond it."""
TOLERANCE = 1e-4
"""Largest error of the log of the median step's time."""
PRIOR_ROWS = 4
"""Steps that the spread of community code counts as, beside the user's steps."""
HEAD = "# Written by python -m pipeline.backends.ascend.validate --calibrate"

REQUIRED = ("model", "batch", "step_ms", "chip")
DEFAULTS: Mapping[str, str] = {
    "pixels": "224",
    "classes": "1000",
    "devices": "1",
    "precision": "O2",
    "mode": "loop_sink",
    "framework": "MindSpore",
}
"""Columns that a table may lack, as in published.csv, and their values then."""
FRAMEWORKS = ("MindSpore", "PyTorch", "TensorFlow")
"""First words of `framework`, before a version; the ops of each have their own launches."""
OTHER_TIMES = ("ms", "step", "time", "step_time", "seconds", "s", "us")
"""Names of a column that may have the times of steps, but not surely in milliseconds."""


class MeasuredStepsError(PipelineError):
    """A table of measured steps that no chip's file can be made from."""

    exit_status = 2


@dataclass(frozen=True)
class FittedChip:
    """A factor on the time of a chip's device, by measured steps.

    `log_ratios` are of measured / modelled steps at this factor. `log_sd` is the spread of another
    step, of a network that wasn't measured.
    """

    factor: float
    log_ratios: tuple[float, ...]
    networks: int

    @property
    def log_sd(self) -> float:
        """Standard deviation of the log of another step's time.

        The spread of the steps and of community code, weighted as `PRIOR_ROWS` steps, as in a
        normal model with a conjugate prior (Gelman et al. 2013, section 3.3).
        """
        community = load_populations().by_name["community"]
        prior = community.network_log_sd**2 + community.row_log_sd**2
        count = len(self.log_ratios)
        squares = PRIOR_ROWS * prior + sum(ratio**2 for ratio in self.log_ratios)
        return math.sqrt(squares / (PRIOR_ROWS + count - 1) * (1 + 1 / count))


def calibrate_chip(file: Path, chip: str) -> str:
    """Write the chip's file beside a table of steps, and return a text about it.

    Raises MeasuredStepsError for a bad table, ChipError for an unknown chip.
    """
    priced_chip = chipset(chip)
    if not (CONF / "device" / f"{chip}.yaml").is_file():
        raise MeasuredStepsError(f"--chip {chip}: must be the name of a chip, such as ascend910")
    rows = read_steps(file, chip)
    output = file.with_suffix(".yaml")
    if (CONF / "device" / output.name).is_file():
        raise MeasuredStepsError(f"{file}: {output.stem} is a shipped device; rename the file")
    _check_output(output)
    fitted = fit_factor(file, rows, priced_chip)
    text = "\n".join(_format_chip(file, chip, priced_chip, fitted)) + "\n"
    with convert_write_errors(output):
        write_whole(output, text)
    return "\n".join(_format_result(rows, output, fitted))


def _check_output(output: Path) -> None:
    """Raise MeasuredStepsError if a file that isn't of an earlier calibration would be lost.

    Raises RunError if its folder can't be written to, before minutes of pricing.
    """
    try:
        is_other = output.exists() and not output.read_bytes().startswith(HEAD.encode())
    except OSError:
        is_other = True
    if is_other:
        raise MeasuredStepsError(f"{output}: isn't of an earlier --calibrate; must be moved away")
    if not os.access(output.parent, os.W_OK):
        raise RunError(f"{output}: can't be written: there is no permission to write to its folder")


def read_steps(file: Path, chip: str) -> tuple[Published, ...]:
    """Return the steps of a table. Raises MeasuredStepsError with what is missing."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines)
            columns = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            rows = [dict(row) for row in reader]
    except (OSError, UnicodeError, csv.Error) as error:
        raise MeasuredStepsError(f"{file}: not readable as a table: {error}") from error
    _check_columns(file, columns)
    if len(rows) < MIN_ROWS:
        raise MeasuredStepsError(
            f"{file}: has {count_noun(len(rows), 'step')}; a factor needs at least {MIN_ROWS}, of "
            "networks or batches like those to be priced"
        )
    steps = [_parse_step(file, number, row, chip) for number, row in enumerate(rows, start=1)]
    _check_repeats(file, steps)
    return tuple(steps)


def _check_repeats(file: Path, steps: Sequence[Published]) -> None:
    """Raise MeasuredStepsError for a step that is there twice, which isn't measured twice."""
    seen: dict[Published, str] = {}
    for step in steps:
        first = seen.setdefault(replace(step, id=""), step.id)
        if first != step.id:
            raise MeasuredStepsError(
                f"{file}, step {step.id}: repeats step {first}, with the same time; must be there "
                "once"
            )


def _check_columns(file: Path, columns: Sequence[str]) -> None:
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t"):
        raise MeasuredStepsError(f"{file}: has no commas; must have commas between its columns")
    for name in columns:
        if columns.count(name) > 1:
            raise MeasuredStepsError(f"{file}, column {show(name)}: must be there once")
        if name in OTHER_TIMES and "step_ms" not in columns:
            raise MeasuredStepsError(
                f"{file}, column {name}: must be step_ms, the milliseconds of a step"
            )
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise MeasuredStepsError(
            f"{file}: lacks {', '.join(missing)}; must have the columns {', '.join(REQUIRED)}, "
            f"and may have {', '.join(DEFAULTS)}"
        )
    allowed = (*REQUIRED, *DEFAULTS)
    for name in columns:
        if name not in allowed:
            guess = find_nearest(name, allowed)
            question = f"; did you mean {guess}?" if guess else ""
            raise MeasuredStepsError(
                f"{file}, column {show(name)}: must be one of {', '.join(allowed)}{question}"
            )


def _parse_step(file: Path, number: int, row: Mapping[Any, Any], chip: str) -> Published:
    place = f"{file}, step {number}"
    if None in row or None in row.values():
        raise MeasuredStepsError(f"{place}: must have a value for each column")
    cells = {name: text.strip() for name, text in row.items()}
    empty = [name for name in REQUIRED if not cells[name]]
    if empty:
        raise MeasuredStepsError(f"{place}: lacks {', '.join(empty)}")
    if cells["chip"] != chip:
        raise MeasuredStepsError(
            f"{place}: chip = {show(cells['chip'])}: must be {chip}; steps of another chip are "
            "calibrated with --chip, in a table of their own"
        )
    values = {name: cells.get(name) or default for name, default in DEFAULTS.items()}
    if values["framework"].partition(" ")[0] not in FRAMEWORKS:
        raise MeasuredStepsError(
            f"{place}: framework = {show(values['framework'])}: must be one of "
            f"{', '.join(FRAMEWORKS)}, with its version behind it or without"
        )
    values |= {
        "id": str(number),
        "model": cells["model"],
        "family": "measured",
        "batch": cells["batch"],
        "fusion": "",
        "op_launch_us": "",
        "ms": cells["step_ms"],
        "quality": "device",
        "source": file.name,
    }
    try:
        step = parse_row(values)
        if cells.get("pixels"):
            require_pixels(step)
        return step
    except ValueError as error:
        raise MeasuredStepsError(f"{place}: {error}".replace("ms = ", "step_ms = ")) from error


def fit_factor(file: Path, rows: Sequence[Published], chip: PricedChip) -> FittedChip:
    """Return the factor with which the median step takes as long as measured.

    Raises MeasuredStepsError for a step that can't be priced or is beyond `MAX_FACTOR` of the
    others, a factor beyond it, and steps that no factor explains, as they wait for the host.
    """
    calibration = load_calibration()
    pricings = []
    for row in rows:
        with _name_step(file, row):
            pricings.append(Pricing(trace_row(row), chip, calibration))

    def measure(factor: float) -> np.ndarray:
        figures = scale_figures(chip.hardware, factor)
        logs = []
        for row, pricing in zip(rows, pricings, strict=True):
            with _name_step(file, row):
                step = pricing.with_figures(**figures).price_step(configure_row(row))
            logs.append(math.log(row.ms) - math.log(step.step_ms))
        return np.array(logs)

    limit = math.log(MAX_FACTOR)
    with suppress(ValueError):  # The median has the same sign at both limits.
        log_factor = brentq(
            lambda x: np.median(measure(math.exp(x))), -limit, limit, xtol=TOLERANCE / 10
        )
        ratios = measure(math.exp(log_factor))
        if abs(np.median(ratios)) < TOLERANCE:
            _check_outliers(file, rows, ratios)
            networks = len({row.model for row in rows})
            return FittedChip(math.exp(log_factor), tuple(ratios.tolist()), networks)
    raise MeasuredStepsError(
        f"{file}: no factor from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g} on the device explains these "
        "steps; must be milliseconds of one step each, which doesn't wait for the host"
    )


@contextmanager
def _name_step(file: Path, row: Published) -> Iterator[None]:
    """Raise MeasuredStepsError with the file and the step for an error of the block."""
    try:
        yield
    except (PipelineError, ValueError, TypeError, ArithmeticError) as error:
        raise MeasuredStepsError(f"{file}, step {row.id}: {first_line(error)}") from error


def _check_outliers(file: Path, rows: Sequence[Published], ratios: np.ndarray) -> None:
    """Raise MeasuredStepsError for a step that isn't of the unit or the device of the others."""
    worst = int(np.argmax(np.abs(ratios)))
    if abs(ratios[worst]) > math.log(MAX_FACTOR):
        longer = "long" if ratios[worst] > 0 else "short"
        raise MeasuredStepsError(
            f"{file}, step {rows[worst].id}: step_ms = {rows[worst].ms:g}: is more than "
            f"{MAX_FACTOR:g} times as {longer} as modelled by the factor of all steps; must be "
            "milliseconds of one step"
        )


def scale_figures(hardware: Hardware, factor: float) -> dict[str, float]:
    """Return the figures of a device whose work takes `factor` times as long."""
    scaled = {name: getattr(hardware, name) / factor for name in SPEEDS}
    return scaled | {name: getattr(hardware, name) * factor for name in TIMES}


def _format_chip(
    file: Path, chip: str, priced_chip: PricedChip, fitted: FittedChip
) -> Iterator[str]:
    count = count_noun(len(fitted.log_ratios), "step")
    yield f"{HEAD} {printable(file.name)}"
    yield f"# {count} take {fitted.factor:.3f} times as long as modelled, at the median."
    yield f"defaults: [{chip}, _self_]"
    yield f"chip: {priced_chip.name} by measured steps"
    yield (
        f"measured_steps: {{rows: {len(fitted.log_ratios)}, networks: {fitted.networks}, "
        f"log_sd: {fitted.log_sd:.3f}}}"
    )
    for name, value in scale_figures(priced_chip.hardware, fitted.factor).items():
        before = getattr(priced_chip.hardware, name)
        sign = "/" if name in SPEEDS else "x"
        source = f"{before:g} {sign} {fitted.factor:.3f}, by {count} that I measured"
        yield f'{name}: {{value: {value:.6g}, source: "{source}", confidence: derived}}'
    source = "the steps are of this chip"
    yield f'other_chip_spread_ratio: {{value: 0, source: "{source}", confidence: measured}}'


def _format_result(rows: Sequence[Published], output: Path, fitted: FittedChip) -> Iterator[str]:
    yield f"{'network':24} {'batch':>6} {'dev.':>5} {'measured':>9} {'modelled':>9}  ms a step"
    for row, ratio in zip(rows, fitted.log_ratios, strict=True):
        modelled_ms = row.ms / math.exp(ratio)
        yield (f"{row.model:24} {row.batch:6d} {row.devices:5d} {row.ms:9.2f} {modelled_ms:9.2f}")
    low, high = (math.exp(sign * NORMAL_90 * fitted.log_sd) for sign in (-1, 1))
    yield (
        f"{output}: the device's work takes {fitted.factor:.3f} times as long; 80 % of other steps "
        f"{low:.2f} to {high:.2f} times as long as modelled with it"
    )
    yield f"device={output if output.is_absolute() else f'./{output}'} prices with it"
