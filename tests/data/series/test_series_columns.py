"""Columns of times: numbers, days and months, and the first row that isn't regular."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.file_errors import name_file
from pipeline.data.series.series_columns import RegularTimes, read_times
from pipeline.data.table import TableFormat
from pipeline.data.tables.fit_table import read_table


def read(folder: Path, texts: Sequence[str], date_format: str | None = None) -> RegularTimes:
    file = folder / "a.csv"
    file.write_text("time,v\n" + "".join(f'"{text}",1\n' for text in texts))
    table = read_table(file, TableFormat(), lambda name: "category")
    with name_file(file):
        times = read_times(table, "time", date_format)
        times.require_even_steps(np.arange(table.rows))
    return times


@pytest.mark.parametrize(
    ("texts", "unit"),
    [
        (["1700", "1701", "1702"], ""),
        (["0.1", "0.2", "0.3", "0.4"], ""),
        (["2024-02-28", "2024-02-29", "2024-03-01"], " days"),
        (["2024-01-01", "2024-02-01", "2024-03-01"], " months"),
        (["2023-12-31", "2024-01-31", "2024-02-29", "2024-03-31"], " months"),
        (["2022-07-15", "2023-07-15", "2024-07-15"], " months"),
        (["2024-01-01 00:00", "2024-01-01 12:00", "2024-01-02 00:00"], " days"),
        (["1700000000.01", "1700000000.02", "1700000000.03", "1700000000.04"], ""),
        (["2024-01-01 00:00:00.01", "2024-01-01 00:00:00.02", "2024-01-01 00:00:00.03"], " days"),
        (["1"], ""),
    ],
)
def test_regular_times_are_accepted(texts: list[str], unit: str, tmp_path: Path) -> None:
    assert read(tmp_path, texts).unit == unit


def test_date_format_is_used(tmp_path: Path) -> None:
    times = read(tmp_path, ["19580329", "19580405", "19580412"], "%Y%m%d")
    assert np.diff(times.positions).tolist() == [7, 7]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["1", "2", "2", "3"], "line 4: time = 2 is a repeat of the row before it"),
        (["1", "2", "4", "3"], "line 5: time = 3 is earlier than 4 in the row before it"),
        (["1", "3", "2", "4"], "line 4: time = 2 is earlier than 3 in the row before it"),
        (["3", "2", "1"], "line 3: time = 2 is earlier than 3"),
        (["1", "2", "3", "5", "6"], "line 5: time = 5 comes 2 after 3, and most rows 1 after"),
        (
            ["2024-01-01", "2024-02-01", "2024-03-01", "2024-05-01"],
            "line 5: time = 2024-05-01 comes 2 months after 2024-03-01, and most rows 1 months",
        ),
        (["1", "", "3"], "line 3: time is missing; must be a time"),
        (["1", "b", "3"], "time: its values, such as .*, aren't all numbers or dates; set"),
        (["01/02/2024", "02/02/2024", "03/02/2024"], "time: .* fit several formats of dates"),
    ],
)
def test_first_wrong_row_is_named(texts: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path}/a.csv: {message}"):
        read(tmp_path, texts)


def test_date_of_another_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 3: time = x: must be a date of the format %Y"):
        read(tmp_path, ["2024", "x"], "%Y")
