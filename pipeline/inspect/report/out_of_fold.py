"""Results of a cross-validation: metrics over the folds, and a prediction for each sample.

Files in the directory of the sweep whose jobs are the folds:

folds.csv           mean, standard deviation and the value in each fold, of every metric
out_of_fold.csv     the prediction for each training sample, by the run that didn't train on it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.files.csv_file import format_csv
from pipeline.data.folds import find_folds
from pipeline.inspect.report.evaluated import evaluate_samples
from pipeline.inspect.report.report_files import list_predictions, replace_files
from pipeline.stages.data import drop_folds, load_data, read_selected
from pipeline.stages.record.member_runs import find_jobs
from pipeline.stages.record.trained_run import read_trained_run
from pipeline.study.sweep.table import read_jobs

FOLDS = "folds.csv"
OUT_OF_FOLD = "out_of_fold.csv"


@dataclass(frozen=True)
class FoldMetric:
    """A metric of each fold's evaluation, in the order of the folds."""

    name: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def std(self) -> float:
        """The standard deviation between folds, with n - 1 in its denominator."""
        return float(np.std(self.values, ddof=1))

    def cells(self) -> dict[str, Any]:
        """Return the values by column."""
        folds = {f"fold_{number}": value for number, value in enumerate(self.values)}
        return {"metric": self.name, "mean": self.mean, "std": self.std, **folds}


def read_fold_metrics(sweep_dir: Path) -> list[FoldMetric]:
    """Return the metrics that all folds of a sweep have as finite numbers, except the count."""
    folds = [row.summary.numbers() for row in read_jobs(sweep_dir)]
    names = [name for name in folds[0] if name != "count" and all(name in fold for fold in folds)]
    return [FoldMetric(name, tuple(numbers[name] for numbers in folds)) for name in names]


def write_folds(sweep_dir: Path, metrics: Sequence[FoldMetric]) -> int:
    """Write both files, and return the number of samples with a prediction.

    Raises DataError if a job's checkpoint or the data can't be read, RunError if a file can't be
    written.
    """
    rows = _predict_out_of_fold(sweep_dir)
    folds = format_csv(metric.cells() for metric in metrics)
    replace_files(sweep_dir, (), {FOLDS: folds, OUT_OF_FOLD: format_csv(rows)})
    return len(rows)


def _predict_out_of_fold(sweep_dir: Path) -> list[dict[str, Any]]:
    """Return a row for each training sample, by its number in the split as it was read."""
    rows: list[dict[str, Any]] = []
    assigned: np.ndarray | None = None
    numbers = np.empty(0, np.int64)
    for job in find_jobs(sweep_dir):
        run = read_trained_run(job)
        evaluates_all = run.recipe.eval.model_copy(update={"samples": "all"})
        recipe = run.recipe.model_copy(update={"eval": evaluates_all})
        folds = recipe.dataset.folds
        assert folds is not None, "the job of a fold"
        if assigned is None:
            raw = read_selected(drop_folds(recipe))
            assigned = find_folds(raw, folds, recipe.dataset.ignore_index)
            numbers = np.arange(len(assigned))
            if raw.train.original_rows is not None:
                numbers = raw.train.original_rows
        samples = numbers[assigned == folds.index]
        dataset = load_data(recipe)
        predictions = evaluate_samples(replace(run, recipe=recipe), dataset)
        for row in list_predictions(predictions, dataset.targets.names):
            index = int(samples[row.pop("index")])
            rows.append({"index": index, "fold": folds.index, **row})
    return sorted(rows, key=lambda row: row["index"])
