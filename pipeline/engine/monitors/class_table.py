"""Figures of an evaluation class by class: a table, and the classes that were never predicted."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core.files.value_text import join_first
from pipeline.engine.callbacks.events import Evaluation

MOST_ROWS = 20
"""The most classes that have a table in the log."""
MOST_NAMED = 5
"""The most classes that a warning names."""
WIDEST_NAME = 30


def class_table(evaluation: Evaluation) -> list[str]:
    """Return a heading and a line for each class with its precision, recall, F1 and labels.

    Empty for an evaluation without classes, and for one of more than MOST_ROWS.
    """
    names = class_names(evaluation)
    confusion = evaluation.confusion
    if confusion is None or not 0 < len(names) <= MOST_ROWS:
        return []
    titles = [n if len(n) <= WIDEST_NAME else f"{n[: WIDEST_NAME - 3]}..." for n in names]
    width = max(map(len, ("class", *titles)))
    columns = [evaluation.metrics[key]["per_class"] for key in ("precision", "recall", "f1")]
    lines = [f"{'class':<{width}}  precision  recall      f1  {evaluation.counted:>9}"]
    for place, name in enumerate(names):
        precision, recall, f1 = (column[name] for column in columns)
        count = int(confusion[place].sum())
        lines.append(
            f"{titles[place]:<{width}}  {precision:9.4f}  {recall:6.4f}  {f1:6.4f}  {count:9,}"
        )
    return lines


def never_predicted(evaluation: Evaluation) -> str | None:
    """Return a warning of the classes that have labels and were never predicted; None if there are
    no such classes, or too many classes."""
    names = class_names(evaluation)
    confusion = evaluation.confusion
    if confusion is None or not names:
        return None
    actual = confusion.sum(axis=1)
    predicted = confusion.sum(axis=0)
    missed = [
        f"{name} ({count:,} {evaluation.counted})"
        for name, count, guesses in zip(names, actual.tolist(), predicted.tolist(), strict=True)
        if count and not guesses
    ]
    if not missed:
        return None
    return f"never predicted: {join_first(missed, MOST_NAMED)}"


def class_names(evaluation: Evaluation) -> Sequence[str]:
    """Return the names of the classes in the order of their labels; empty if there are none."""
    recall = evaluation.metrics.get("recall")
    return list(recall.get("per_class", ())) if isinstance(recall, dict) else []
