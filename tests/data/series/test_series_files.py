"""Series in tables with a row for each step, and in .npz files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.series.series_files import LongForm, RawSeries, read_series

FORM = LongForm("series", "time", "label", None, None)
HEAD = "series,time,u,v,label\n"


def read_csv(folder: Path, rows: str, head: str = HEAD) -> RawSeries:
    (folder / "a.csv").write_text(head + rows)
    return read_series(folder / "a.csv", FORM)


def read_npz(folder: Path, **arrays: Any) -> RawSeries:
    np.savez(folder / "a.npz", **arrays)
    return read_series(folder / "a.npz", FORM)


def test_rows_of_a_table_are_grouped_by_series(tmp_path: Path) -> None:
    raw = read_csv(tmp_path, "b,1,1,2,x\na,5,7,8,y\nb,2,3,4,x\n")
    assert [values.tolist() for values in raw.values] == [[[1, 2], [3, 4]], [[7, 8]]]
    assert (raw.labels, raw.places) == (("x", "y"), ("series b", "series a"))


def test_value_columns_are_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEAD + "a,1,text,2,x\n")
    form = LongForm("series", "time", "label", ("v",), None)
    assert read_series(tmp_path / "a.csv", form).values[0].tolist() == [[2]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,1,1,2,x\na,2,1,2,y\n", "line 3: label = y, and the rows of this series before it have"),
        ("a,1,1,2,x\na,1,1,2,x\n", "line 3: time = 1 is a repeat of the row before it"),
        ("a,1,1,2,x\nb,9,1,2,x\na,0,1,2,x\n", "line 4: time = 0 is earlier than 1 in the row"),
        ("a,1,1,2,x\na,2,1,2,x\na,4,1,2,x\n", "line 4: time = 4 comes 2 after 2"),
        ("a,1,1,,x\n", "line 2: v is missing; fill it before"),
        ("a,1,1,b,x\n", "line 2: v = 'b': must be a number"),
        ("a,1,1,2,\n", "line 2: label is missing"),
    ],
)
def test_wrong_row_is_named(rows: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"a.csv: {message}"):
        read_csv(tmp_path, rows)


def test_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a.csv: has no column label; it has series, time, u"):
        read_csv(tmp_path, "a,1,2\n", "series,time,u\n")
    with pytest.raises(DataError, match=r"has no columns of values beside the series"):
        read_csv(tmp_path, "a,1,2\n", "series,time,label\n")


def test_arrays_have_one_channel_or_several(tmp_path: Path) -> None:
    raw = read_npz(tmp_path, series=np.ones((3, 4), np.float32), label=np.array([2, 0, 10]))
    assert raw.values[0].shape == (4, 1)
    assert raw.list_classes() == ("0", "2", "10")
    raw = read_npz(tmp_path, series=np.ones((2, 4, 3)), label=np.array(["b", "a"]))
    assert raw.channels == 3
    assert raw.list_classes() == ("a", "b")


def test_arrays_to_predict_need_no_label(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", series=np.ones((2, 4)))
    raw = read_series(tmp_path / "a.npz", replace(FORM, needs_labels=False))
    assert raw.labels == ("", "")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"series": np.ones((2, 3))}, "lacks label; it has series"),
        ({"series": np.ones(3), "label": np.ones(3)}, r"series is float64 of shape \(3,\); must"),
        ({"series": np.ones((2, 3)), "label": np.ones(3)}, r"label is float64 of shape \(3,\)"),
        (
            {"series": np.array([[1.0], [np.nan]]), "label": np.array([0, 1])},
            "series 1: step 0 has a missing value",
        ),
    ],
)
def test_wrong_array_is_named(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"a.npz: {message}"):
        read_npz(tmp_path, **arrays)


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_text("")
    with pytest.raises(DataError, match=r"must end in one of \.ts, \.npz, \.csv"):
        read_series(tmp_path / "a.wav", FORM)
