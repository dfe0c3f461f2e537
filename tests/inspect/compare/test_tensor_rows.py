"""Rows of a comparison: counterparts, mapping, thresholds, files."""

from __future__ import annotations

import csv
import io

import numpy as np

from pipeline.inspect.compare.accuracy_columns import compare_arrays
from pipeline.inspect.compare.cause_hints import find_amplifiers, list_hints
from pipeline.inspect.compare.tensor_rows import (
    HEADER,
    TensorRow,
    Thresholds,
    compare_tensors,
    format_rows,
    pair_names,
    to_csv,
)
from pipeline.inspect.dumps.tensor_names import TensorName

LEFT = {
    TensorName("conv", "output"): np.array([1.0, 2.0, 3.0]),
    TensorName("extra", "output"): np.array([0.0, 1.0]),
}
RIGHT = {
    TensorName("conv", "output"): np.array([1.0, 2.0, 3.5]),
    TensorName("bias", "output"): np.array([1.0, 2.0, 3.0]),
}


def rows(mapped: dict[str, tuple[str, ...]] | None = None) -> list[TensorRow]:
    return compare_tensors(list(LEFT), list(RIGHT), LEFT.get, RIGHT.get, mapped or {})


def test_unpaired_operator_has_a_star() -> None:
    cells = [row.cells for row in rows()]
    assert [line[:4] for line in cells] == [
        ("0", "conv", "conv", "output:0"),
        ("1", "extra", "*", "output:0"),
        ("2", "*", "bias", "output:0"),
    ]
    assert cells[1][4:9] == ("NaN",) * 5


def test_fused_operator_pairs_with_several() -> None:
    pairs = pair_names(list(LEFT), list(RIGHT), {"conv": ("conv", "bias"), "extra": ("bias",)})
    named = [(left and left.layer, right and right.layer) for left, right in pairs]
    assert named == [("conv", "conv"), ("conv", "bias"), ("extra", "bias")]


def test_rows_beyond_a_threshold_are_marked() -> None:
    far = compare_arrays(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0]))
    assert not Thresholds(cosine=0.9, relative_euclidean=0.3).are_exceeded(far)
    assert Thresholds(relative_euclidean=0.1).are_exceeded(far)
    text = format_rows(rows(), Thresholds())
    assert [line[0] for line in text] == [" ", "!", " ", " "]


def test_csv_has_all_rows() -> None:
    lines = list(csv.reader(io.StringIO(to_csv(rows()))))
    assert tuple(lines[0]) == HEADER
    assert len(lines) == 4
    assert lines[1][9] == "(2;0.816497),(2.16667;1.0274)"


def test_hints_name_amplifiers_and_unpaired_operators() -> None:
    read = compare_arrays(np.array([1.0, 1.001]), np.array([1.0, 1.0]))
    given = compare_arrays(np.array([1.0, 1.1]), np.array([1.0, 1.0]))
    names = TensorName("exp", "input"), TensorName("exp", "output")
    grown = [TensorRow(0, names[0], names[0], read), TensorRow(1, names[1], names[1], given)]
    ((layer, gain),) = find_amplifiers(grown)
    assert layer == "exp"
    assert abs(gain - 100) < 1
    (quantized,) = compare_tensors(
        [TensorName("conv", "output")],
        [TensorName("conv", "output")],
        lambda name: np.ones(3, np.int8),
        lambda name: np.ones(3, np.float32),
        {},
    )
    hints = list_hints([*grown, TensorRow(2, names[0], None), quantized], None)
    assert [hint.partition(":")[0] for hint in hints] == [
        "op fusion or constant folding",
        "int8",
        "amplifier structures",
    ]
