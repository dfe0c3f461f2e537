"""Tables of a report as CSV files; predictions.csv has a line for each sample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.files.csv_file import format_csv
from pipeline.data.targets import Targets
from pipeline.inspect.report.evaluated import (
    ClassCounts,
    ClassPredictions,
    LabelPredictions,
    MatchPredictions,
    NumberPredictions,
    PositionPredictions,
    Predictions,
)

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
