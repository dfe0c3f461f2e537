"""The source `forecast`: a split in time without a leak, and tables that can't be forecast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.sources.series import Forecast
from tests.data.section import section

ROWS = np.random.default_rng(0).normal(size=(40, 2)).round(3)


def source(root: Path, **fields: Any) -> Forecast:
    sizes = {"input_length": 5, "horizon": 3, "eval_fraction": 0.3}
    return Forecast(**section(root=root, **{**sizes, **fields}))


def save(folder: Path, rows: np.ndarray = ROWS) -> Path:
    lines = [f"{time},{u},{v}" for time, (u, v) in enumerate(rows.tolist())]
    (folder / "a.csv").write_text("\n".join(["time,u,v", *lines]) + "\n")
    return folder / "a.csv"


def read(folder: Path, **fields: Any) -> RawData:
    return source(save(folder), **fields).read(Path())


def test_windows_have_rows_of_one_split(tmp_path: Path) -> None:
    raw = read(tmp_path)
    train = np.asarray(raw.train.columns["series"])
    evaluated = np.asarray(raw.eval.columns["series"])
    assert (train.shape, evaluated.shape) == ((21, 5, 2), (5, 5, 2))
    rows = ROWS.astype(np.float32)
    np.testing.assert_array_equal(train[-1], rows[20:25])
    np.testing.assert_array_equal(evaluated[0], rows[28:33])
    labels = raw.targets.to_data_units(np.asarray(raw.train.columns["label"], np.float64))
    np.testing.assert_allclose(labels[-1], ROWS[25:28].ravel(), atol=1e-6)
    labels = raw.targets.to_data_units(np.asarray(raw.eval.columns["label"], np.float64))
    np.testing.assert_allclose(labels[-1], ROWS[37:40].ravel(), atol=1e-6)
    assert raw.classes == ("u+1", "v+1", "u+2", "v+2", "u+3", "v+3")


def test_training_does_not_depend_on_evaluated_rows(tmp_path: Path) -> None:
    before = read(tmp_path)
    changed = ROWS.copy()
    changed[28:] = 1000
    changed[-1] = 0
    after = source(save(tmp_path, changed)).read(Path())
    for name in ("series", "label"):
        np.testing.assert_array_equal(before.train.columns[name], after.train.columns[name])
    assert before.scale == after.scale
    assert before.targets.mean == after.targets.mean


def test_target_and_stride_are_chosen(tmp_path: Path) -> None:
    raw = read(tmp_path, value_columns="u", target="v", stride=4)
    assert np.asarray(raw.train.columns["series"]).shape == (6, 5, 1)
    assert len(raw.eval) == 5
    assert raw.classes == ("v+1", "v+2", "v+3")


def test_naive_error_is_that_of_the_season_before(tmp_path: Path) -> None:
    raw = read(tmp_path, period=4, target="u")
    starts = range(28, 33)
    errors = [abs(ROWS[s + 5 + h, 0] - ROWS[s + 5 + h - 4, 0]) for s in starts for h in range(3)]
    assert raw.targets.naive_mae == pytest.approx(np.mean(errors))
    assert raw.notes == (
        f"seasonal naive, the value of 4 steps before: mean absolute error {np.mean(errors):.5g} "
        "in the evaluation windows",
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\n7,", "\n6,", r"line 9: time = 6 is a repeat of the row before it"),
        ("\n7,", "\n7.5,", r"line 9: time = 7.5 comes 1.5 after 6, and most rows 1 after"),
        ("\n7,", "\n3,", r"line 9: time = 3 is earlier than 6 in the row before it"),
        ("\n7,", "\n,", r"line 9: time is missing"),
        (f"\n7,{ROWS[7, 0]}", "\n7,", r"line 9: u is missing; fill it before"),
        (f"\n7,{ROWS[7, 0]}", "\n7,b", r"line 9: u = 'b': must be a number"),
        ("time,u,v", "t,u,v", r"has no column time"),
    ],
)
def test_wrong_row_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = save(tmp_path)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=f"a.csv: {message}"):
        source(file).read(Path())


def test_short_series_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"leaves 12 for evaluation; a window has .* = 13"):
        read(tmp_path, input_length=10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"period": 6}, "period = 6: must be at most input_length = 5"),
        ({"folds": {"count": 5, "index": 0}}, "folds: must be null; windows of one fold overlap"),
        ({"target": "time"}, "time_column = time: must not be in value_columns or target"),
        ({"buckets": ((5,),)}, "buckets: must be null; windows have one size"),
    ],
)
def test_settings_that_leak_or_do_not_fit_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match=message):
        source(tmp_path / "a.csv", **fields)
