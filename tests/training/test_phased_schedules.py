"""Learning rates from a file (L-03): what is read, and what is wrong with others."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipeline.training.phased_schedules import MAX_BYTES, TableSchedule

RATES = np.linspace(0.1, 0.001, 7)


def save_npy(file: Path, array: np.ndarray, *, pickled: bool = False) -> None:
    np.save(file, array, allow_pickle=pickled)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f8"])
def test_array_of_any_floating_dtype_is_read(dtype: str, tmp_path: Path) -> None:
    file = tmp_path / "lr.npy"
    save_npy(file, RATES.astype(dtype))
    found = TableSchedule(file=file).read()
    np.testing.assert_array_equal(found.rates, RATES.astype(dtype).astype(np.float64))
    assert found.dtype == np.dtype(dtype).name
    assert found.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("suffix", [".csv", ".txt"])
def test_text_file_has_one_rate_per_line(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"lr{suffix}"
    np.savetxt(file, RATES, header="rates of three epochs")
    np.testing.assert_array_equal(TableSchedule(file=file).read().rates, RATES)
    file.write_text("0.5\n\n 1e-3 \n# the rest is warm-down\n0\n")
    assert TableSchedule(file=file).read().rates.tolist() == [0.5, 0.001, 0.0]


def test_text_may_begin_with_the_mark_of_an_editor(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv"
    file.write_text("0.5\n0.25\n", encoding="utf-8-sig")
    assert TableSchedule(file=file).table(1.0, 2, 1).tolist() == [0.5, 0.25]


@pytest.mark.medium
@given(
    rates=arrays.arrays(
        np.float64, st.integers(1, 50), elements=st.floats(0, 1e30, allow_subnormal=False)
    ),
    used=st.integers(1, 50),
)
def test_table_uses_its_first_rates_unscaled(
    rates: np.ndarray, used: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("rates") / "lr.npy"
    save_npy(file, rates)
    schedule, used = TableSchedule(file=file), min(used, len(rates))
    tables = [schedule.table(lr, used, 10) for lr in (0.1, 7.0)]
    for table in tables:
        assert table.dtype == np.float32
        np.testing.assert_array_equal(table, rates[:used].astype(np.float32))


def test_error_of_a_short_file_has_both_lengths(tmp_path: Path) -> None:
    save_npy(tmp_path / "lr.npy", RATES)
    with pytest.raises(ValueError, match=r"lr\.npy: has 7 rates, and training has 1,000 updates"):
        TableSchedule(file=tmp_path / "lr.npy").table(0.1, 1000, 10)


def with_value(value: float) -> Callable[[Path], None]:
    return lambda file: save_npy(file, np.array([0.1, value, 0.1]))


NEGATIVE = "the rate of update 1 is -0.1; must be finite and not negative"
WRONG: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "nan": ("a.npy", with_value(np.nan), "the rate of update 1 is nan; must be finite"),
    "infinite": ("a.npy", with_value(np.inf), "the rate of update 1 is inf; must be finite"),
    "above float32": ("a.npy", with_value(1e39), "the rate of update 1 is 1e+39; must be finite"),
    "negative": ("a.npy", with_value(-0.1), NEGATIVE),
    "several": (
        "a.csv",
        lambda file: file.write_text("0.1\nnan\n-1\n"),
        "the rate of update 1 is nan, and 1 more are wrong; must be finite",
    ),
    "rank": ("a.npy", lambda file: save_npy(file, np.ones((3, 1))), "has shape (3, 1); must be ("),
    "number": ("a.npy", lambda file: save_npy(file, np.array(0.1)), "has shape (); must be ("),
    "type": ("a.npy", lambda file: save_npy(file, np.arange(3)), "holds int64; must be one of "),
    "pickled": (
        "a.npy",
        lambda file: save_npy(file, np.array([0.1, {}], object), pickled=True),
        "its array holds objects; must be plain numbers",
    ),
    "a pickle": (
        "a.npy",
        lambda file: file.write_bytes(b"\x80\x04\x95"),
        "isn't a file that numpy",
    ),
    "truncated": (
        "a.npy",
        lambda file: (save_npy(file, RATES), os.truncate(file, 150)),
        "its array has shape (7,), which doesn't match the file's size",
    ),
    "columns": ("a.csv", lambda file: file.write_text("1,2\n"), "line 1 is 1,2; must be one num"),
    "heading": ("a.csv", lambda file: file.write_text("lr\n1\n"), "line 1 is lr; must be one num"),
    "no text": ("a.txt", lambda file: file.write_bytes(b"\xff\xfe"), "isn't text in UTF-8; must"),
    "empty": ("a.txt", lambda file: file.write_text("# none\n"), "has no rates; must have one"),
    "suffix": ("a.pt", lambda file: file.touch(), "must end in .npy, .csv, .txt"),
    "missing": ("a.npy", lambda file: None, "can't be read: No such file or directory"),
    "huge": (
        "a.npy",
        lambda file: (file.touch(), os.truncate(file, MAX_BYTES + 1)),
        "has more than 67,108,864 bytes",
    ),
    "a pipe": ("a.npy", os.mkfifo, "isn't a regular file"),
    "a folder": ("a.npy", Path.mkdir, "isn't a regular file"),
}


@pytest.mark.parametrize(("name", "write", "message"), WRONG.values(), ids=WRONG.keys())
def test_rate_file_error_has_one_line(
    name: str, write: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    write(file)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        TableSchedule(file=file).read()
    assert str(caught.value).startswith(f"file = {file}: {message}")
    assert "\n" not in str(caught.value)
