"""The columns of a comparison: by hand, and by a second program of the same formulas.

Rows of a comparison: counterparts, mapping, thresholds, files.
The page of a comparison holds all rows, texts stay texts, and only its own script may run.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from math import isnan, log, nan, sqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from pipeline.core.errors import RunError
from pipeline.inspect.compare.layer_errors import find_amplifiers, list_hints
from pipeline.inspect.compare.tensor_rows import (
    EPSILON,
    HEADER,
    Columns,
    TensorRow,
    Thresholds,
    compare_arrays,
    compare_tensors,
    format_rows,
    pair_names,
    to_csv,
    write_page,
)
from pipeline.inspect.dumps.dump_files import TensorName
from tests.inspect.compare import cann_formulas

X, Y = np.array([1.0, 2.0, 2.0, 4.0]), np.array([1.0, 2.0, 4.0, 2.0])
LEFT = {
    TensorName("conv", "output"): np.array([1.0, 2.0, 3.0]),
    TensorName("extra", "output"): np.array([0.0, 1.0]),
}
RIGHT = {
    TensorName("conv", "output"): np.array([1.0, 2.0, 3.5]),
    TensorName("bias", "output"): np.array([1.0, 2.0, 3.0]),
}
HOSTILE = "</script><img src=x onerror=alert(1)>"


def test_columns_match_hand_computed_values() -> None:
    found = compare_arrays(X, Y)
    # x.y = 1 + 4 + 8 + 8 = 21, |x|^2 = |y|^2 = 25
    assert found.cosine == pytest.approx(21 / 25, abs=1e-6)
    assert found.max_absolute == 2
    # 0, 0, |2/4 - 1|, |4/2 - 1|
    assert found.accumulated_relative == pytest.approx(1.5, abs=1e-6)
    assert found.relative_euclidean == pytest.approx(sqrt(8) / 5, abs=1e-6)
    # p = (0, 1, 1, 3) / 5, q = (0, 1, 3, 1) / 5; the zeros are epsilon on both sides
    assert found.divergence == pytest.approx(0.4 * log(3), abs=1e-6)
    assert found.left == pytest.approx((2.25, sqrt(19) / 4), abs=1e-6)
    assert found.right == pytest.approx((2.25, sqrt(19) / 4), abs=1e-6)
    assert found.mean_absolute == pytest.approx(1.0)
    assert found.root_mean_square == pytest.approx(sqrt(2))
    assert (found.max_relative, found.mean_relative) == pytest.approx((1.0, 0.375))
    assert str(compare_arrays(X, X).left) == "(2.25;1.08972)"


def test_accumulated_relative_error_skips_zeros() -> None:
    left, right = np.array([1.1, 5.0, 3.3]), np.array([1.0, 0.0, 3.0])
    assert compare_arrays(left, right).accumulated_relative == pytest.approx(0.2)
    assert compare_arrays(
        np.tile(left, 10), np.tile(right, 10)
    ).accumulated_relative == pytest.approx(2)


@pytest.mark.parametrize(
    ("left", "right", "cosine", "divergence", "distance"),
    [
        (np.zeros(3), np.zeros(3), 1.0, 0.0, 0.0),
        (np.zeros(3), np.arange(3.0), nan, nan, 1.0),
        (np.arange(3.0), np.zeros(3), nan, nan, 0.0),
        (np.full(3, 2.0), np.full(3, 5.0), 1.0, 0.0, 0.6),
        (np.array(2.0), np.array(-3.0), 1.0, 0.0, 5 / 3),
    ],
    ids=["both zero", "left zero", "right zero", "equal elements", "scalars"],
)
def test_columns_of_special_values(
    left: np.ndarray, right: np.ndarray, cosine: float, divergence: float, distance: float
) -> None:
    found = compare_arrays(left, right)
    assert found.cosine == pytest.approx(cosine, nan_ok=True)
    assert found.divergence == pytest.approx(divergence, nan_ok=True)
    assert found.relative_euclidean == pytest.approx(distance)
    assert not isnan(found.max_absolute)


@pytest.mark.parametrize(
    ("left", "right"),
    [(np.ones(3), np.ones(4)), (np.array([1.0, np.nan]), np.ones(2)), (np.ones(0), np.ones(0))],
    ids=["shapes", "not finite", "empty"],
)
def test_incomparable_arrays_have_nan_columns(left: np.ndarray, right: np.ndarray) -> None:
    found = compare_arrays(left, right)
    empty = Columns()
    for name in ("cosine", "max_absolute", "divergence", "relative_euclidean"):
        assert isnan(getattr(found, name))
        assert isnan(getattr(empty, name))


numbers = st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)


@pytest.mark.medium
@given(of_numpy.arrays(np.float32, st.integers(2, 40), elements=numbers))
@settings(max_examples=150, deadline=None)
def test_columns_match_cann_formulas(x: np.ndarray) -> None:
    y = np.float32(x * 1.01 + 0.25 * np.sin(np.arange(len(x))))
    found, left, right = compare_arrays(x, y), x.tolist(), y.tolist()
    expected = {
        "cosine": cann_formulas.cosine(left, right),
        "max_absolute": cann_formulas.max_absolute(left, right),
        "accumulated_relative": cann_formulas.accumulated_relative(left, right),
        "relative_euclidean": cann_formulas.relative_euclidean(left, right),
        "divergence": cann_formulas.divergence(left, right),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6, abs=1e-6, nan_ok=True), name
    assert found.left == pytest.approx(cann_formulas.mean_and_deviation(left), rel=1e-6, abs=1e-6)
    assert found.right == pytest.approx(cann_formulas.mean_and_deviation(right), rel=1e-6, abs=1e-6)


@pytest.mark.medium
def test_sums_are_float64() -> None:
    many = np.full(1 << 20, 0.1, np.float32)
    found = compare_arrays(many, many)
    assert found.left.mean == pytest.approx(float(np.float32(0.1)), rel=1e-12)
    assert found.cosine == pytest.approx(1.0, abs=1e-12)
    assert EPSILON == cann_formulas.EPSILON


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


def make_rows() -> list[TensorRow]:
    names = [TensorName(layer, "output", "0") for layer in (HOSTILE, "conv", "lost")]
    left = {name: np.arange(4.0) for name in names}
    right = {names[0]: np.arange(4.0), names[1]: np.array([9.0, 1, 2, 3])}
    return compare_tensors(names, names[:2], left.get, right.get, {})


def test_page_has_all_rows_and_its_script_alone_may_run(tmp_path: Path) -> None:
    rows = make_rows()
    write_page(rows, tmp_path / "rows.html", Thresholds(cosine=0.9))
    text = (tmp_path / "rows.html").read_text()
    assert HOSTILE not in text
    found = re.search(r'<script type="application/json" id="rows">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["header"] == list(HEADER)
    assert data["rows"] == [list(row.cells) for row in rows]
    assert [row[1] for row in data["rows"]] == [HOSTILE, "conv", "lost"]
    assert [(limit["name"], limit["value"], limit["below"]) for limit in data["limits"]] == [
        ("CosineSimilarity", 0.9, True),
        ("MaxAbsoluteError", 5.0, False),
        ("RelativeEuclideanDistance", 0.1, False),
    ]
    for place, limit in enumerate(data["limits"]):
        assert HEADER[limit["column"]] == limit["name"]
        assert f'<input type="range" id="limit-{place}"' in text
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}';" in text
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write", script)


def test_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rows\.html: can't be written"):
        write_page(make_rows(), tmp_path / "missing" / "rows.html", Thresholds())
