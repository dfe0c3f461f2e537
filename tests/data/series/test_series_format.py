"""Files of new series, which have no labels and the size that a network reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.columns import ColumnSpec, Targets
from pipeline.data.series.series_columns import ScaleSeries
from pipeline.data.series.series_format import SeriesFormat
from pipeline.stages.export.inference_files import list_inputs, list_suffixes
from pipeline.stages.record.trained_run import Samples

SCALE = ScaleSeries(mean=(7.0, 9.0), std=(1.0, 1.0))
TS = "@classLabel {}\n@data\n"
ROWS = [f"{series},{step},{step * 10},{step * 100}" for series in "ba" for step in range(3)]


def read(path: Path, content: str, steps: int = 3, **fields: Any) -> np.ndarray:
    path.write_text(content)
    settings = {"kind": "labelled", "time_column": "time", "value_columns": None}
    settings |= {"date_format": None, "series_column": "series", "label_column": "label"}
    return SeriesFormat(**{**settings, **fields}).read(
        path, ColumnSpec((steps, 2), "float32"), SCALE
    )


def test_series_of_a_ts_file_need_no_labels(tmp_path: Path) -> None:
    lines = "1,2,3:4,5,6{0}\n7,8,9:1,1,1{0}\n"
    unlabelled = read(tmp_path / "a.ts", TS.format("false") + lines.format(""))
    assert (unlabelled.dtype, unlabelled.shape) == (np.float32, (2, 3, 2))
    assert unlabelled[0].tolist() == [[1, 4], [2, 5], [3, 6]]
    labelled = read(tmp_path / "b.ts", TS.format("true a b") + lines.format(":?"))
    np.testing.assert_array_equal(labelled, unlabelled)


@pytest.mark.parametrize("label", ["", ",x"])
def test_series_of_a_table_are_in_the_order_of_its_rows(label: str, tmp_path: Path) -> None:
    head = f"series,time,u,v{label and ',label'}\n"
    values = read(tmp_path / "a.csv", head + "".join(f"{row}{label}\n" for row in ROWS))
    assert values.tolist() == [[[0, 0], [10, 100], [20, 200]]] * 2
    renamed = head.replace("u,v", "v,u")
    values = read(
        tmp_path / "b.csv",
        renamed + "".join(f"{row}{label}\n" for row in ROWS),
        value_columns=("u", "v"),
    )
    assert values[0].tolist() == [[0, 0], [100, 10], [200, 20]]


def test_series_are_cut_and_padded_as_in_training(tmp_path: Path) -> None:
    content = TS.format("false") + "1,2,3:4,5,6\n1:4\n"
    values = read(tmp_path / "a.ts", content, steps=2, is_cut=True)
    assert values.tolist() == [[[1, 4], [2, 5]], [[1, 4], [7, 9]]]


def test_forecast_reads_the_last_rows(tmp_path: Path) -> None:
    content = "time,u,v\n" + "".join(f"{step},{step},{-step}\n" for step in range(9))
    values = read(tmp_path / "a.csv", content, kind="forecast", value_columns=("v", "u"))
    assert values.tolist() == [[[-6, 6], [-7, 7], [-8, 8]]]


@pytest.mark.parametrize(
    ("name", "content", "fields", "message"),
    [
        ("a.ts", TS.format("false") + "1,2:3,4\n", {}, "a.ts: has 2 steps x 2 channels; the net"),
        ("a.ts", TS.format("false") + "1,2,3\n", {}, "has 3 steps x 1 channels; the network reads"),
        ("a.csv", "time,u,v\n1,2,3\n", {}, "a.csv: has no column series"),
        (
            "a.csv",
            "series,time,u,v\na,0,1,1\na,2,1,1\na,3,1,1\na,4,1,1\n",
            {},
            "line 3: time = 2 comes 2 after 0, and most rows 1 after the one before",
        ),
        (
            "a.csv",
            "time,u,v\n0,1,1\n1,1,1\n",
            {"kind": "forecast"},
            "has 2 rows; the network reads the last 3",
        ),
        (
            "a.csv",
            "time,u,v\n0,1,1\n1,1,\n2,1,1\n",
            {"kind": "forecast"},
            "line 3: v is missing; fill it before",
        ),
    ],
)
def test_file_of_another_form_is_refused(
    name: str, content: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path / name, content, **fields)


def test_folder_is_searched_for_its_files(tmp_path: Path) -> None:
    """Of a compressed table the name has two ends."""
    names = ["a.csv.gz", "b.npy", "c.parquet", "d.ts", "e.png"]
    for name in names:
        (tmp_path / name).touch()
    fields = {"time_column": "time", "value_columns": None, "date_format": None}
    found = []
    for kind in ("labelled", "forecast"):
        series = SeriesFormat(kind=kind, **fields)
        samples = Samples({"series": ColumnSpec((3, 2), "float32")}, Targets(()), series=series)
        found.append([file.name for file in list_inputs(tmp_path, list_suffixes(samples))])
    assert found == [names[:4], names[:3]]


def test_forecast_without_columns_of_values_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv: has no columns of values besides time"):
        read(tmp_path / "a.csv", "time\n1\n2\n3\n", kind="forecast")
