from __future__ import annotations

import numpy as np

from pipeline.engine.callbacks.callback import Evaluation
from pipeline.engine.monitors.monitors import describe_never_predicted, format_class_table


def of_confusion(confusion: np.ndarray, names: list[str]) -> Evaluation:
    """An evaluation with the figures that belong to a matrix of counts."""
    hits = np.diag(confusion)
    actual, predicted = confusion.sum(axis=1), confusion.sum(axis=0)
    ratios = {
        "precision": hits / np.maximum(predicted, 1),
        "recall": hits / np.maximum(actual, 1),
        "f1": 2 * hits / np.maximum(actual + predicted, 1),
    }
    figures = {
        key: {"macro": float(of.mean()), "per_class": dict(zip(names, of.tolist(), strict=True))}
        for key, of in ratios.items()
    }
    return Evaluation({"loss": 1.0, "count": int(confusion.sum()), **figures}, confusion)


def test_class_table_has_a_line_per_class() -> None:
    found = of_confusion(np.array([[1200, 300], [0, 500]]), ["cat", "a dog"])
    assert format_class_table(found) == [
        "class  precision  recall      f1    samples",
        "cat       1.0000  0.8000  0.8889      1,500",
        "a dog     0.6250  1.0000  0.7692        500",
    ]
    assert describe_never_predicted(found) is None


def test_long_names_are_truncated() -> None:
    found = of_confusion(np.eye(2, dtype=int), ["x" * 31, "y" * 30])
    assert [line.split()[0] for line in format_class_table(found)[1:]] == [
        "x" * 27 + "...",
        "y" * 30,
    ]


def test_too_many_classes_have_no_table() -> None:
    names = [str(number) for number in range(21)]
    assert format_class_table(of_confusion(np.eye(21, dtype=int), names)) == []
    assert len(format_class_table(of_confusion(np.eye(20, dtype=int), names[:20]))) == 21


def test_evaluation_without_classes_has_no_table_and_no_warning() -> None:
    numbers = Evaluation({"mae": 1.0, "count": 3}, None)
    assert format_class_table(numbers) == []
    assert describe_never_predicted(numbers) is None


def test_never_predicted_classes_are_named() -> None:
    """One without labels can't be missed."""
    confusion = np.zeros((4, 4), int)
    confusion[:3, 0] = [5, 1200, 1]
    found = of_confusion(confusion, ["a", "b", "c", "d"])
    assert describe_never_predicted(found) == "never predicted: b (1,200 samples), c (1 samples)"


def test_warning_is_truncated_with_many_classes() -> None:
    confusion = np.zeros((9, 9), int)
    confusion[:, 0] = 2
    warning = describe_never_predicted(of_confusion(confusion, list("abcdefghi")))
    assert warning is not None
    assert warning.endswith("f (2 samples) and 3 more")


def test_control_characters_of_names_are_escaped() -> None:
    evaluation = of_confusion(np.array([[0, 2], [0, 3]]), ["a\nb", "c"])
    assert [line.split()[0] for line in format_class_table(evaluation)[1:]] == ["a\\nb", "c"]
    assert describe_never_predicted(evaluation) == "never predicted: a\\nb (2 samples)"
