"""Tables of a report as CSV files: predictions.csv has a line for each sample, of the evaluation
split or out of the folds of a cross-validation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.files.csv_file import format_csv
from pipeline.data.columns import Targets
from pipeline.data.folds import find_folds
from pipeline.inspect.report.evaluated import (
    ClassCounts,
    ClassPredictions,
    LabelPredictions,
    MatchPredictions,
    NumberPredictions,
    PositionPredictions,
    Predictions,
    evaluate_samples,
)
from pipeline.stages.data import drop_folds, load_data, read_selected
from pipeline.stages.record.member_runs import find_jobs
from pipeline.stages.record.trained_run import read_trained_run
from pipeline.study.sweep.table import read_jobs

PREDICTIONS = "predictions.csv"
CLASSES = "classes.csv"
CONFUSION = "confusion.csv"
NUMBERS = "numbers.csv"
LABELS = "labels.csv"
MAX_CONFUSIONS = 10


def replace_files(folder: Path, names: Iterable[str], files: Mapping[str, str | bytes]) -> None:
    """Delete the files `names` of an earlier result, and write `files` in their order.

    Raises RunError if a file can't be written.
    """
    with convert_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / name).unlink(missing_ok=True)
        for name, content in files.items():
            write_whole(folder / name, content)


def csv_files(predictions: Predictions, targets: Targets) -> Mapping[str, str]:
    """Return the texts of an evaluation's CSV files by file name."""
    names = targets.names
    files = {PREDICTIONS: format_csv(list_predictions(predictions, names))}
    if isinstance(predictions, MatchPredictions):
        return files
    if isinstance(predictions, NumberPredictions):
        return {**files, NUMBERS: format_csv(number_rows(predictions, names))}
    if isinstance(predictions, LabelPredictions):
        rows = count_rows(predictions.counts, names)
        labels = [{"label": row.pop("class"), **row} for row in rows]
        return {**files, LABELS: format_csv(labels)}
    files[CLASSES] = format_csv(count_rows(predictions.counts, names))
    if predictions.counts.confusion is not None:
        # The prefix keeps columns apart from `true`, which may be the name of a class.
        header = [f"predicted {name}" for name in names]
        matrix = zip(names, predictions.counts.confusion.tolist(), strict=True)
        files[CONFUSION] = format_csv(
            {"true": name, **dict(zip(header, counts, strict=True))} for name, counts in matrix
        )
    return files


def count_rows(counts: ClassCounts, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return precision, recall, F1 and the number of labels of each class."""
    ratios = np.stack(counts.ratios(), axis=1).tolist()
    return [
        {"class": name, "precision": p, "recall": r, "f1": f1, "count": count}
        for name, (p, r, f1), count in zip(names, ratios, counts.actual.tolist(), strict=True)
    ]


def confusion_rows(counts: ClassCounts, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the most frequent confusions, as counts and as shares of the true class."""
    if counts.confusion is None:
        return []
    wrong = counts.confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:MAX_CONFUSIONS]
    cells = [divmod(int(cell), len(names)) for cell in order]
    return [
        {
            "true": names[true],
            "predicted as": names[predicted],
            "count": int(wrong[true, predicted]),
            "of the class": f"{wrong[true, predicted] / max(1, counts.actual[true]):.1%}",
        }
        for true, predicted in cells
        if wrong[true, predicted]
    ]


def number_rows(predictions: NumberPredictions, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return MAE, RMSE and R squared of each number."""
    figures = np.stack(predictions.figures(), axis=1).tolist()
    return [
        {"number": name, "mae": mae, "rmse": rmse, "r2": r2}
        for name, (mae, rmse, r2) in zip(names, figures, strict=True)
    ]


def list_predictions(predictions: Predictions, names: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Yield the row of each sample in a file of predictions; `index` is its place in the split."""
    match predictions:
        case ClassPredictions():
            rows = zip(
                predictions.samples.tolist(),
                predictions.labels.tolist(),
                predictions.predicted.tolist(),
                predictions.probability.tolist(),
                strict=True,
            )
            for index, label, predicted, share in rows:
                class_names = {"label": names[label], "prediction": names[predicted]}
                yield {"index": index, **class_names, "probability": f"{share:.6f}"}
        case MatchPredictions():
            pairs = zip(predictions.ranks.tolist(), predictions.nearest.tolist(), strict=True)
            for index, (rank, nearest) in enumerate(pairs):
                yield {"index": index, "rank": rank, "nearest": nearest}
        case PositionPredictions():
            for index, share in enumerate(predictions.right.tolist()):
                # The share is NaN if all labels of a sample are ignored.
                yield {"index": index, "right": "" if math.isnan(share) else f"{share:.6f}"}
        case NumberPredictions():
            pairs = zip(predictions.true.tolist(), predictions.predicted.tolist(), strict=True)
            for index, (true, predicted) in enumerate(pairs):
                yield {"index": index, **_pair_columns(names, true, predicted)}
        case LabelPredictions():
            labels = np.asarray(predictions.true, int).tolist()
            samples = zip(labels, predictions.probabilities.tolist(), strict=True)
            for index, (true, shares) in enumerate(samples):
                rounded = [f"{share:.6f}" for share in shares]
                yield {"index": index, **_pair_columns(names, true, rounded, "probability of")}


def _pair_columns(
    names: Sequence[str], true: Sequence[Any], predicted: Sequence[Any], prefix: str = "predicted"
) -> dict[str, Any]:
    """Return two columns for each name, in turns: the true value and the predicted value."""
    columns: dict[str, Any] = {}
    for name, value, prediction in zip(names, true, predicted, strict=True):
        columns |= {name: value, f"{prefix} {name}": prediction}
    return columns


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
