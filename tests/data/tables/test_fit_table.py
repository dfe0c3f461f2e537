from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import find_table_layout
from pipeline.data.table import FittedTable, TableFormat
from pipeline.data.tables import fit_table as module
from pipeline.data.tables.encode_table import (
    EncodeTable,
    TableLayout,
    make_encoding_ops,
)
from pipeline.data.tables.fit_table import (
    FitOptions,
    encode_rows,
    fit_table,
    read_encoded_rows,
    read_table,
)
from pipeline.data.tables.raw_table import KindOf, RawTable, Texts
from tests.conftest import ROOT

FORM = TableFormat(missing_values=("",))


def write(folder: Path, rows: list[list[Any]], *names: str) -> Path:
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return folder / "a.csv"


def fitted(
    path: Path,
    training: int,
    kind_of: KindOf = lambda name: "auto",
    standardise: bool = True,
    indicators: bool = False,
    max_categories: int = 1000,
) -> tuple[FittedTable, np.ndarray]:
    raw = read_table(path, FORM, kind_of)
    options = FitOptions(kind_of, standardise, indicators, max_categories)
    try:
        table = fit_table(raw, list(raw.columns), np.arange(training), FORM, options)
        return table, encode_rows(table, raw)
    except ValueError as error:
        raise DataError(str(error)) from error


def encode(table: FittedTable, rows: np.ndarray, reads: Any) -> dict[str, np.ndarray]:
    """The columns that the op writes: the same on the host and the device, as it says."""
    (op,) = make_encoding_ops(table, reads)
    on_host, on_device = op.map(np, (rows,), None), op.map(jnp, (jnp.asarray(rows),), None)
    specs = op.outputs((ColumnSpec(rows.shape[1:], "float32"),))
    for host, device, spec in zip(on_host, on_device, specs, strict=True):
        np.testing.assert_array_equal(host, device)
        assert host.dtype == device.dtype == spec.dtype
        assert host.shape[1:] == spec.shape
    return dict(zip(op.written, on_host, strict=True))


def as_input(table: FittedTable, rows: np.ndarray) -> np.ndarray:
    return encode(table, rows, "features")["features"]


@pytest.mark.medium
def test_encoding_matches_scikit_learn_golden(tmp_path: Path) -> None:
    """StandardScaler, SimpleImputer with indicators and OneHotEncoder, fitted on the first rows."""
    golden = json.loads((ROOT / "tests" / "golden" / "tables.json").read_text())["encoding"]
    path = write(tmp_path, golden["rows"], "a", "b", "colour")
    table, rows = fitted(path, golden["training"], indicators=True)
    np.testing.assert_allclose(as_input(table, rows), golden["encoded"], atol=2e-6)
    again = FittedTable.model_validate(json.loads(json.dumps(table.to_dict())))
    assert again == table
    np.testing.assert_array_equal(read_encoded_rows(path, again)[0], rows)


@pytest.mark.medium
def test_missing_value_is_a_category_and_unknown_value_is_zeros(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, [["b", 1], ["", 2], ["a", 3], ["c", 2], ["", 2]], "x", "n")
    table, rows = fitted(path, 3)
    assert [(c.name, c.kind) for c in table.columns] == [("n", "numeric"), ("x", "category")]
    assert table.columns[1].categories == ("", "a", "b")
    assert rows[:, 1].tolist() == [3, 1, 2, 0, 1]
    one_hot = as_input(table, rows)[:, 1:]
    assert one_hot.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0]]
    fields = encode(table, rows, "fields")
    assert fields["field_index"].tolist() == [[0, 3], [0, 1], [0, 2], [0, 1], [0, 1]]
    assert fields["field_index"].dtype == np.int32
    assert fields["field_value"][:, 1].tolist() == [1, 1, 1, 0, 1]
    np.testing.assert_array_equal(fields["field_value"][:, 0], rows[:, 0])
    layout = find_table_layout(make_encoding_ops(table, "fields"))
    assert layout == TableLayout(1, (3,))
    assert layout.features == 4
    np.testing.assert_array_equal(encode(table, rows, "rows")["features"], rows)
    assert find_table_layout(()) is None


def test_most_frequent_categories_are_distinguished(tmp_path: Path) -> None:
    path = write(tmp_path, [[c, 0] for c in "aabbbccdde"], "x", "n")
    table, rows = fitted(path, 10, max_categories=3)
    assert table.categories[0].categories == ("a", "b", "c")
    assert rows[-1, -1] == 0


def test_table_too_large_for_the_summary_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SAVED_BYTES", 1000)
    path = write(tmp_path, [[f"town {n}"] for n in range(200)], "town")
    with pytest.raises(DataError, match=r"and a run keeps 1,000; set dataset.max_categories"):
        fitted(path, 200)


def test_standardisation_can_be_disabled(tmp_path: Path) -> None:
    path = write(tmp_path, [[1, 5], ["", 5], [3, 5]], "x", "constant")
    assert fitted(path, 3, standardise=False)[1].tolist() == [[1, 5], [2, 5], [3, 5]]
    assert fitted(path, 3)[1].tolist() == [[-1, 0], [0, 0], [1, 0]]


def test_equal_numbers_become_zero(tmp_path: Path) -> None:
    # The computed deviation of 24 numbers 0.1 is 1.4e-17, by which the last row would be 7e15.
    path = write(tmp_path, [[0.1]] * 24 + [[0.2]], "x")
    table, rows = fitted(path, 24)
    assert (table.columns[0].mean, table.columns[0].std) == (0.1, 1)
    np.testing.assert_allclose(rows.ravel(), [0] * 24 + [0.1], rtol=1e-6)


def test_empty_column_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, [["", 1, ""], ["", 2, "x"]], "a", "b", "c")
    table, rows = fitted(path, 1)
    assert (table.left_out, rows.shape) == (("a", "c"), (2, 1))
    assert str(table) == "numeric b; left out, without values: a, c"
    with pytest.raises(DataError, match="has no column with values besides the targets"):
        fitted(write(tmp_path, [["", ""]], "a", "b"), 1)


def test_mixed_column_is_named_with_row_and_value(tmp_path: Path) -> None:
    path = write(tmp_path, [[1], [2], ["two"], [4]], "a")
    expected = "line 4: a = 'two', and 75.0% of its values are numbers; correct it, or add it"
    with pytest.raises(DataError, match=expected):
        fitted(path, 4)
    assert fitted(path, 4, lambda name: "category")[0].columns[0].kind == "category"
    with pytest.raises(DataError, match="line 4: a = 'two': must be a number"):
        fitted(path, 4, lambda name: "numeric")


def test_other_files_are_encoded_with_the_table(tmp_path: Path) -> None:
    table, rows = fitted(write(tmp_path, [[1, "x"], [3, "y"]], "a", "colour"), 2)
    (tmp_path / "new.csv").write_text("extra,colour,a\n?,y,3\n")
    assert read_encoded_rows(tmp_path / "new.csv", table)[0].tolist() == rows[1:].tolist()
    (tmp_path / "new.csv").write_text("color,a\ny,3\n")
    with pytest.raises(
        DataError, match=r"new.csv: has no column colour; did you mean color\? it has"
    ):
        read_encoded_rows(tmp_path / "new.csv", table)
    (tmp_path / "new.csv").write_text("colour,a\ny,three\n")
    with pytest.raises(DataError, match=r"new.csv: line 2: a = 'three': must be a number"):
        read_encoded_rows(tmp_path / "new.csv", table)
    (tmp_path / "new.csv").write_text("colour,a\n")
    with pytest.raises(DataError, match=r"new.csv: has no rows"):
        read_encoded_rows(tmp_path / "new.csv", table)


def test_dates_of_other_files_use_the_fitted_format(tmp_path: Path) -> None:
    rows = [["2024-01-01 06:00"], ["2024-01-03T18:00:00Z"], [""], ["2024-07-01 12:00"]]
    table, encoded = fitted(write(tmp_path, rows, "when"), 3, indicators=True)
    parts = [column.date.part for column in table.columns if column.date is not None]
    assert parts == ["days", *(f"{w}_{c}" for c in ("year", "week", "day") for w in ("sin", "cos"))]
    assert FittedTable.model_validate(json.loads(json.dumps(table.to_dict()))) == table
    # Two dates: one standard deviation from their mean, which a missing date becomes.
    np.testing.assert_allclose(encoded[:3, 0], [-1, 1, 0], atol=1e-6)
    np.testing.assert_allclose(encoded[:2, 5:7], [[1, 0], [-1, 0]], atol=1e-6)
    np.testing.assert_allclose(encoded[2, 1:7], encoded[:2, 1:7].mean(axis=0), atol=1e-6)
    np.testing.assert_array_equal(encoded[:, 7], [0, 0, 1, 0])
    # A Monday and a Wednesday.
    week = 2 * np.pi * np.array([0, 2]) / 7
    np.testing.assert_allclose(
        encoded[:2, 3:5], np.transpose([np.sin(week), np.cos(week)]), atol=1e-6
    )
    np.testing.assert_array_equal(
        read_encoded_rows(write(tmp_path, rows, "when"), table)[0], encoded
    )
    with pytest.raises(
        DataError, match=r"line 2: when = '01\.02\.24': must be a date such as 2024"
    ):
        read_encoded_rows(write(tmp_path, [["01.02.24"]], "when"), table)


@pytest.mark.parametrize("texts", [["2024-01-01", "soon"], ["2024-01-01", "01.02.2024"], ["May 1"]])
def test_texts_without_common_date_format_are_categories(tmp_path: Path, texts: list[str]) -> None:
    table, _ = fitted(write(tmp_path, [[text] for text in texts], "when"), len(texts))
    assert table.categories[0].categories == tuple(sorted(texts))


def test_stored_table_without_dates_is_read(tmp_path: Path) -> None:
    kept = {
        "columns": [{"name": "a", "kind": "numeric", "mean": 1.0, "std": 2.0}],
        "format": {"missing_values": [""]},
    }
    table = FittedTable.model_validate(kept)
    encoded, _ = read_encoded_rows(write(tmp_path, [["5"], [""]], "a"), table)
    np.testing.assert_array_equal(encoded, [[2], [0]])


def test_number_too_far_from_the_mean_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, [[1e-30], [2e-30], [1e30]], "a")
    with pytest.raises(DataError, match=r"line 4: a = 1e\+30 is too far from the mean 1.5e-30"):
        fitted(path, 2)


def test_rows_of_wrong_width_are_refused() -> None:
    op = EncodeTable(numbers=2, categories=(3,), reads="features")
    with pytest.raises(ValueError, match=r"needs rows of 3 columns, not \(4,\)"):
        op.outputs((ColumnSpec((4,), "float32"),))


def test_column_without_any_value_is_no_column_of_numbers() -> None:
    """All rows are missing, so there is no text that could be named."""
    column = Texts(np.full(3, -1, np.int32), ())
    with pytest.raises(ValueError, match=r"^age: must be numbers$"):
        RawTable({"age": column}, ("age",), 3, str).get_numbers("age")


def test_robust_numbers_are_scaled_by_quartiles_and_clipped(tmp_path: Path) -> None:
    golden = np.load(ROOT / "tests" / "golden" / "table_network.npz")
    column = golden["column"]
    rows = [[f"{number:.17g}", 5, index % 2] for index, number in enumerate(column)]
    path = write(tmp_path, [*rows, ["1e9", 5, 1], ["", 6, 0]], "a", "equal", "few")
    raw = read_table(path, FORM, lambda name: "auto")
    options = FitOptions(lambda name: "auto", True, False, 1000, robust=True)
    table = fit_table(raw, list(raw.columns), np.arange(len(column)), FORM, options)
    encoded = encode_rows(table, raw)
    # scikit-learn's RobustScaler, then RealMLP's smooth clip
    scaled = (column - golden["centre"]) / golden["scale"]
    expected = scaled / np.sqrt(1 + (scaled / 3) ** 2)
    np.testing.assert_allclose(encoded[: len(column), 0], expected, rtol=1e-5, atol=1e-6)
    assert encoded[-2, 0] == pytest.approx(3, abs=1e-6)
    assert encoded[-1, 0] == 0  # a missing number is the median
    assert (encoded[: len(column), 1] == 0).all()
    # Quartiles 0 and 1 of a column of 0 and 1 are its range.
    assert table.numeric[2].std == 1


def test_range_replaces_equal_quartiles() -> None:
    numbers = np.array([0.0] * 90 + [8.0] * 10)
    assert module.measure_robustly(numbers) == (0.0, 4.0)


def test_listed_dates_of_no_known_format_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path, [["2024 AD"], ["2025 AD"]], "day")
    options = FitOptions(lambda name: "date", True, True, 9)
    raw = read_table(path, FORM, options.kind_of)
    with pytest.raises(ValueError, match="must be dates, but no known format fits all of them; "):
        fit_table(raw, ["day"], np.arange(2), FORM, options)
