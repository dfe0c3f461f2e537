"""Labels from the columns of a table: the task, the order of classes, and wrong values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.data.image_table import parse_labels


@pytest.mark.parametrize(
    ("columns", "task", "names"),
    [
        ({"kind": ["owl", "ant", "owl"]}, "classification", ("ant", "owl")),
        ({"kind": ["10", "9", "10"]}, "classification", ("9", "10")),
        ({"kind": ["1.0", "2.0", "1.0"]}, "classification", ("1.0", "2.0")),
        ({"price": ["1.5", "2", "1"]}, "regression", ("price",)),
        ({"a": ["1", "0", "1"], "b": ["0", "1", "1"]}, "multi_label", ("a", "b")),
        ({"a": ["1", "0", "1"], "b": ["0", "2", "1"]}, "regression", ("a", "b")),
    ],
)
def test_task_is_inferred_from_the_values(
    columns: dict[str, list[str]], task: str, names: tuple[str, ...]
) -> None:
    labels = parse_labels(columns, "auto")
    assert (labels.task, labels.names) == (task, names)
    if task == "classification":
        read = [labels.names[label] for label in labels.labels]
        assert read == columns["kind"]
        assert labels.groups is labels.labels
    else:
        read = np.array([list(map(float, column)) for column in columns.values()]).T
        np.testing.assert_array_equal(labels.labels, read)
        assert not labels.groups.any()


@pytest.mark.parametrize(
    ("columns", "task", "message"),
    [
        ({"a": ["x"], "b": ["y"]}, "classification", "classes are in one column, not in"),
        ({"a": ["1"], "b": ["2"]}, "multi_label", "has the value 2; multi_label needs 0 or 1"),
        ({"a": ["x"]}, "regression", "a"),
        ({"a": ["nan"]}, "regression", "a"),
    ],
)
def test_values_unfit_for_the_task_are_refused(
    columns: dict[str, list[str]], task: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_labels(columns, task)


def test_numbers_are_standardised_and_flags_are_not() -> None:
    train, evaluated = np.array([0, 2]), np.array([1])
    numbers = parse_labels({"price": ["1.5", "9", "2.5"]}, "regression")
    scaled, other, targets = numbers.split_labels(train, evaluated)
    np.testing.assert_allclose(scaled, [[-1], [1]])
    np.testing.assert_allclose(other, [[14]])
    assert targets.task == "regression"
    flags = parse_labels({"a": ["1", "0", "1"], "b": ["0", "1", "1"]}, "multi_label")
    assert flags.split_labels(train, evaluated)[0].tolist() == [[1, 0], [1, 1]]
