"""`python -m pipeline fuzz RUN_DIR`: changed samples and weights that cause wrong predictions."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.cli.commands.command import CommandResult
from pipeline.core.files.atomic_write import format_json
from pipeline.core.files.csv_file import format_csv
from pipeline.core.files.trusted_files import require_real_trees
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.inspect.dumps.opened_recipe import find_newest_step, open_run_recipe
from pipeline.inspect.fuzz import (
    ChangeLimits,
    FaultRow,
    FoolingMutant,
    FuzzResult,
    FuzzSearch,
    Predict,
    count_right,
    find_image_column,
    make_predict,
    measure_faults,
    require_fuzzable,
)
from pipeline.inspect.replay import replay_state
from pipeline.inspect.report.pictures import picture, png, sheet
from pipeline.inspect.report.report_files import replace_files
from pipeline.stages.record.run_directory import FUZZ
from pipeline.training.step import get_evaluated_weights

FACTS = "fuzz.json"
FOOLING = "fooling.csv"
FAULTS = "faults.csv"
SHEET = "sheet.png"
FILES = (FACTS, FOOLING, FAULTS, SHEET)
MAX_PICTURES = 60


def main(
    run_dir: Path,
    radius: float,
    samples: int,
    mutants: int,
    with_faults: bool,
    out: Path | None = None,
) -> CommandResult:
    """Search for changed samples with wrong predictions, and write them into a folder.

    `samples` is the number of samples, `mutants` the number of changed samples to try, and `radius`
    the largest change of a pixel, with pixels from 0 to 1. `out` None: RUN_DIR/fuzz. Raises
    RecipeError for samples that can't be changed, DataError if the run can't be read, RunError if a
    file can't be written.
    """
    step = find_newest_step(run_dir)
    folder = run_dir / FUZZ if out is None else out
    if out is None:
        require_real_trees(run_dir, (FUZZ,))
    with Reporter() as reporter:
        opened = open_run_recipe(run_dir)
        recipe = opened.recipe
        dataset = opened.dataset
        require_fuzzable(dataset, recipe.dataset.name)
        state = replay_state(opened, run_dir, step, reporter)
        weights = get_evaluated_weights(opened.built.step_config, state)
        variables = jax.tree.map(np.asarray, weights)
        predict = make_predict(opened, step)
        count = min(samples, len(dataset.eval))
        rows = np.arange(count) * len(dataset.eval) // count
        limits = ChangeLimits(radius, recipe.dataset.brightest)
        fuzz = FuzzSearch(dataset, partial(predict, variables), recipe.seed, limits)
        with reporter.clock(f"changing samples {mutants:,} times"):
            result = fuzz.search(rows, mutants)
        for line in _format_lines(result, mutants, radius):
            reporter.print_stage("fuzz", line)
        faults: list[FaultRow] = []
        if with_faults:
            faults = _measure_faults(fuzz, variables, rows, predict, reporter)
        facts = {
            "step": step,
            "radius": radius,
            "mutants": mutants,
            **vars(result),
            "fooling": len(result.fooling),
            "fooled_samples": _count_fooled(result),
            "faults": [asdict(row) for row in faults],
        }
        classes = dataset.classes
        files: dict[str, str | bytes] = {
            FACTS: format_json(facts, indent=1) + "\n",
            FOOLING: format_csv(_make_row(mutant, classes) for mutant in result.fooling),
        }
        if faults:
            files[FAULTS] = format_csv(map(asdict, faults))
        if result.fooling:
            files[SHEET] = _draw_sheet(result, dataset)
        replace_files(folder, FILES, files)
        reporter.print_stage("done", f"{folder}: {', '.join(files)}")
    return CommandResult({**facts, "folder": str(folder)})


def _measure_faults(
    fuzz: FuzzSearch, variables: Any, rows: np.ndarray, predict: Predict, reporter: Reporter
) -> list[FaultRow]:
    """Return and print the accuracy on the samples `rows` under each fault of the weights."""
    columns = fuzz.dataset.eval.columns
    images = np.asarray(columns[find_image_column(fuzz.dataset)][rows])
    labels = np.asarray(columns["label"][rows])

    def compute_accuracy(params: Any) -> float:
        logits, _ = predict({**variables, "params": params}, images)
        return count_right(logits, labels) / len(rows)

    faults = []
    for row in measure_faults(variables["params"], compute_accuracy, fuzz.seed):
        text = f"{row.count:,} {row.fault}: accuracy {row.accuracy:.4f}"
        reporter.print_stage("faults", f"{text}, at least {row.least:.4f}")
        faults.append(row)
    return faults


def _count_fooled(result: FuzzResult) -> int:
    return len({mutant.candidate.sample for mutant in result.fooling})


def _format_lines(result: FuzzResult, mutants: int, radius: float) -> list[str]:
    before = result.coverage
    after = result.coverage_with_mutants
    return [
        f"{result.right:,} samples, and {result.wrong:,} wrong ones left out; {mutants:,} changed, "
        f"radius {radius:g}",
        f"{len(result.fooling):,} of them are wrong, of {_count_fooled(result):,} samples",
        f"sections of {result.neurons:,} neurons reached: {before['multisection']:.4f}, with "
        f"changed samples {after['multisection']:.4f}; beyond their ranges "
        f"{before['boundary']:.4f} and {after['boundary']:.4f}",
    ]


def _make_row(mutant: FoolingMutant, classes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "sample": mutant.candidate.sample,
        "label": classes[mutant.candidate.label],
        "prediction": classes[mutant.predicted],
        "probability": f"{mutant.probability:.6f}",
        "changes": " ".join(mutant.candidate.changes),
        "distance": f"{mutant.distance:.6f}",
    }


def _draw_sheet(result: FuzzResult, dataset: Dataset) -> bytes:
    """Return a PNG of samples, each beside its first changed image with a wrong prediction."""
    column = dataset.eval.columns[find_image_column(dataset)]
    first_mutants: dict[int, FoolingMutant] = {}
    for mutant in result.fooling:
        first_mutants.setdefault(mutant.candidate.sample, mutant)
    samples = sorted(first_mutants)[:MAX_PICTURES]
    pictures = []
    captions = []
    for sample, original in zip(samples, np.asarray(column[np.array(samples)]), strict=True):
        mutant = first_mutants[sample]
        pictures.append(picture(np.concatenate([original, mutant.candidate.image], axis=1)))
        row = _make_row(mutant, dataset.classes)
        captions.append((f"{row['prediction']}, is {row['label']}", row["changes"]))
    return png(sheet(pictures, captions))
