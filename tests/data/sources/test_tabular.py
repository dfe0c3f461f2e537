from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.sources.tabular import CsvTable, ParquetTable
from tests.data.section import section

ROWS = "\n".join(f"{n},{'ab'[n % 2]},{n / 4},{n % 3}" for n in range(20))
TABLE = f"size,kind,price,rooms\n{ROWS}\n"


def read(folder: Path, text: str = TABLE, **fields: Any) -> RawData:
    (folder / "mine.csv").write_text(text)
    given = {"root": folder / "mine.csv", "target": "price", **fields}
    return CsvTable(**section(**given)).read(folder / "cache")


def labels(split: Any) -> list[Any]:
    return np.asarray(split.columns["label"]).tolist()


def test_numeric_target_is_standardised(tmp_path: Path) -> None:
    data = read(tmp_path, split=0.25)
    assert (len(data.train), len(data.eval)) == (15, 5)
    assert (data.targets.task, data.targets.names) == ("regression", ("price",))
    train, evaluated = (np.asarray(split.columns["label"]) for split in (data.train, data.eval))
    assert train.dtype == np.float32
    prices = np.concatenate([data.targets.to_data_units(one)[:, 0] for one in (train, evaluated)])
    np.testing.assert_allclose(np.sort(prices), np.arange(20) / 4, atol=1e-6)
    assert train.mean() == pytest.approx(0, abs=1e-6)
    assert train.std() == pytest.approx(1, abs=1e-6)
    assert data.table is not None
    assert [column.name for column in data.table.columns] == ["size", "rooms", "kind"]
    assert data.train.columns["features"].shape == (15, 3)


@pytest.mark.parametrize(
    ("target", "fields", "task", "names"),
    [
        ("kind", {}, "classification", ("a", "b")),
        ("rooms", {}, "classification", ("0", "1", "2")),
        ("rooms", {"task": "regression"}, "regression", ("rooms",)),
        (["price", "rooms"], {}, "regression", ("price", "rooms")),
    ],
)
def test_task_is_inferred_or_set(
    target: Any, fields: dict[str, Any], task: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    targets = read(tmp_path, target=target, **fields).targets
    assert (targets.task, targets.names) == (task, names)


@pytest.mark.slow
def test_texts_of_numbers_are_classes_in_the_order_of_numbers(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    grades = ["10", "9", "-1"] * 4
    pq.write_table(pa.table({"grade": grades, "size": range(12)}), tmp_path / "a.parquet")
    given = {"root": tmp_path / "a.parquet", "target": "grade", "split": 0.25}
    assert ParquetTable(**section(**given)).read(tmp_path).classes == ("-1", "9", "10")


def test_split_is_stratified_by_class(tmp_path: Path) -> None:
    data = read(tmp_path, target="kind", split=0.3, split_seed=7)
    assert sorted(labels(data.eval)) == [0, 0, 0, 1, 1, 1]
    assert np.asarray(data.train.columns["label"]).dtype == np.int32


def test_several_flag_columns_are_multi_label(tmp_path: Path) -> None:
    text = "x,a,b\n" + "\n".join(f"{n},{n % 2},{n % 3 == 0!s}" for n in range(12))
    data = read(tmp_path, text, target=["a", "b"])
    assert data.targets.task == "multi_label"
    assert {tuple(row) for row in labels(data.train) + labels(data.eval)} == {
        (a, b) for a in (0, 1) for b in (0, 1)
    }


def test_eval_path_is_the_evaluation_split(tmp_path: Path) -> None:
    (tmp_path / "eval.csv").write_text("kind,size,rooms,price\nc,0,1,3\na,40,,100\n")
    data = read(tmp_path, eval_path=tmp_path / "eval.csv")
    assert (len(data.train), len(data.eval)) == (20, 2)
    evaluated = np.asarray(data.eval.columns["label"])
    np.testing.assert_allclose(data.targets.to_data_units(evaluated)[:, 0], [3, 100], rtol=1e-6)
    assert np.asarray(data.eval.columns["features"])[:, 2].tolist() == [0, 1]
    (tmp_path / "eval.csv").write_text("kind,size,rooms,price\nc,0,1,3\n")
    with pytest.raises(DataError, match=r"eval.csv: line 2: kind = 'c': no row of the training"):
        read(tmp_path, eval_path=tmp_path / "eval.csv", target="kind")


@pytest.mark.parametrize("write", ["{:%Y-%m-%d}", "{:%d.%m.%Y}", "{:%d/%m/%Y}", "{:%b %d, %Y}"])
def test_date_features_capture_trend_and_season(tmp_path: Path, write: str) -> None:
    """A linear fit to the parts of a date predicts held-out days; a date alone was a category."""
    days = np.arange(6 * 365)
    noise = np.random.default_rng(0).normal(0, 2, len(days))
    temperatures = 10 + days / 400 + 9 * np.sin(2 * np.pi * (days - 100) / 365.25) + noise
    dates = [datetime(2015, 1, 1) + timedelta(int(day)) for day in days]
    rows = (f'"{write.format(d)}",{t}\n' for d, t in zip(dates, temperatures, strict=True))

    data = read(tmp_path, "date,price\n" + "".join(rows))

    assert str(data.table) == "date date (days, sin_year, cos_year, sin_week, cos_week)"
    train, evaluated = (
        np.column_stack([split.columns["features"][:], np.ones(len(split))])
        for split in (data.train, data.eval)
    )
    fit, *_ = np.linalg.lstsq(train, data.train.columns["label"][:], rcond=None)
    labels = data.eval.columns["label"][:]
    assert 1 - np.square(evaluated @ fit - labels).sum() / np.square(labels).sum() > 0.85


def test_row_ids_and_dropped_categories_are_reported(tmp_path: Path) -> None:
    rows = [f"{100 - n},u{n},c{min(n, 30)},{n % 7},{n / 4}\n" for n in range(40)]
    text = "id,code,kind,size,price\n" + "".join(rows)

    notes = read(tmp_path, text, max_categories=20).notes

    columns = [note.partition(":")[0] for note in notes]
    assert columns == ["column id", "column code", "column code", "column kind"]
    assert notes[0].endswith(
        "differs, as a row's number does; leave it out by dataset.ignored=[id] if it is one"
    )
    assert "the 20 most frequent of 32 categories are encoded" in notes[2]
    assert read(tmp_path, text, ignored=["id"], categories=["code"]).notes == ()


def test_ambiguous_date_format_is_reported(tmp_path: Path) -> None:
    text = "day,price\n" + "".join(f"0{n % 9 + 1}/03/2024,{n / 4}\n" for n in range(30))

    found = read(tmp_path, text)
    (note,) = found.notes
    assert "is a date of the formats %d/%m/%Y and %m/%d/%Y, so it is read as a category" in note
    assert str(found.table) == "category day (9)"
    assert "sin_year" in str(read(tmp_path, text, date_format="%m/%d/%Y").table)
    with pytest.raises(DataError, match=r"must be dates, but the values fit the formats %d/%m/%Y"):
        read(tmp_path, text, dates=["day"])


def test_split_depends_only_on_its_seed(tmp_path: Path) -> None:
    splits = [labels(read(tmp_path, split_seed=seed).eval) for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        (TABLE, {"target": "prise"}, "has no column prise; did you mean price?"),
        (TABLE, {"columns": ("sise",)}, r"no column sise; did you mean size\? .*dataset.columns"),
        (TABLE, {"categories": ("kid",)}, r"no column kid; .*\(dataset.categories\)"),
        ("size,price\n", {}, "has no rows"),
        ("", {}, "has no rows"),
        ("size,price\n1,2.5\n", {}, "has 1 rows, of which dataset.split = 0.2 leaves 1 for train"),
        ("price\n1.5\n2\n3\n4\n5\n", {}, "has only target columns; a network needs another one"),
        ("x,price\n" + "1,2\n" * 9, {}, "price is 2 in every row; nothing can be learned"),
        (
            "x,price\n" + "1,2\n" * 9,
            {"task": "regression"},
            "price is the same in all training samples",
        ),
        ("x,price\n1,a\n2,a\n", {}, "price is a in every row; nothing can be learned from it"),
        (
            "x,a,b\n" + "1,0,1\n" * 9,
            {"target": ["a", "b"]},
            "the labels are the same in all rows; nothing can be learned",
        ),
        ("x,price\n1,1.5\n2,\n3,4\n", {}, "line 3: price is missing, and it is a target"),
        ("x,price\n1,1.5\n2,?\n3,cheap\n4,5\n", {}, "line 4: price = 'cheap', and 66.7% of its"),
        (
            "x,price\n1,1.5\n2,cheap\n3,4\n",
            {"task": "regression"},
            "line 3: price = 'cheap': must be a number",
        ),
        ("x,price\n1,1.5\ntwo,2\n" + "3,4\n" * 4, {}, "line 3: x = 'two', and 83.3% of its"),
        (TABLE, {"target": ["price", "kind"]}, "line 2: kind = 'a': must be a number"),
        (TABLE, {"target": ["price", "rooms"], "task": "multi_label"}, "price has values other"),
        (TABLE, {"target": ["kind", "rooms"], "task": "classification"}, "has 2 columns; class"),
    ],
)
def test_unfit_file_is_named(
    text: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"mine.csv: .*{message}"):
        read(tmp_path, text, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"root": None}, "root: missing; it must be a CSV file; dataset.shipped names one"),
        ({"shipped": "wine"}, "root: must be null with dataset.shipped"),
        ({"target": None}, "missing; it must be the name of the column to predict"),
        ({"categories": ("price",)}, "price is named more than once by target, numeric"),
        ({"delimiter": '"'}, "must be one character, and no quote or line break"),
        ({"encoding": "klingon"}, "must be an encoding of texts, such as utf-8"),
        ({"encoding": "base64"}, "must be an encoding of texts, such as utf-8"),
        ({"buckets": ((8, 8),)}, "buckets: must be null; the rows of a table have one shape"),
        ({"split": 1.0}, "less than 1"),
    ],
)
def test_invalid_section_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"root": tmp_path / "a.csv", "target": "price", **fields}
    with pytest.raises(ValidationError, match=message):
        CsvTable(**section(**given))


@pytest.mark.parametrize(
    ("name", "target", "rows", "columns"),
    [
        ("diabetes", "progression", 442, 10),
        ("breast_cancer", "diagnosis", 569, 30),
        ("wine", "cultivar", 178, 13),
    ],
)
def test_shipped_tables_are_read(
    name: Any, target: str, rows: int, columns: int, tmp_path: Path
) -> None:
    data = CsvTable(**section(shipped=name, target=target)).read(tmp_path)
    assert len(data.train) + len(data.eval) == rows
    assert data.train.columns["features"].shape[1] == columns


@pytest.mark.medium
def test_parquet_and_csv_tables_are_equal(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    size = [None if n % 5 == 3 else float(n) for n in range(20)]
    kind = ["ab"[n % 2] if n % 7 else None for n in range(20)]
    year = [2000 + n % 3 for n in range(20)]
    price = [n / 4 for n in range(20)]
    columns = {"size": size, "kind": kind, "year": year, "price": price}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    dictionary = pa.table({**columns, "kind": pa.array(kind).dictionary_encode()})
    pq.write_table(dictionary, tmp_path / "b.parquet", row_group_size=7)
    text = "\n".join(
        ",".join("" if value is None else str(value) for value in row)
        for row in zip(*columns.values(), strict=True)
    )
    fields = {"target": "price", "categories": ("year",), "missing_indicators": True}
    wanted = read(tmp_path, f"size,kind,year,price\n{text}\n", **fields)
    for name in ("a", "b"):
        spec = ParquetTable(**section(root=tmp_path / f"{name}.parquet", **fields))
        found = spec.read(tmp_path)
        for split in ("train", "eval"):
            for column in ("features", "label"):
                np.testing.assert_array_equal(
                    np.asarray(getattr(found, split).columns[column]),
                    np.asarray(getattr(wanted, split).columns[column]),
                )
    assert wanted.table is not None
    assert found.table is not None
    assert found.table.columns == wanted.table.columns


@pytest.mark.medium
def test_empty_text_of_parquet_is_missing(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    columns = {"a": ["x", "", None, " ", "y"] * 4, "b": [0, 1] * 10}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    raw = ParquetTable(**section(root=tmp_path / "a.parquet", target="b")).load(tmp_path)
    assert raw.table is not None
    assert raw.table.columns[0].categories == ("", "x", "y")
    assert raw.notes == ()
    with pytest.raises(DataError, match="row 2: a is missing, and it is a target"):
        ParquetTable(**section(root=tmp_path / "a.parquet", target="a")).load(tmp_path)


@pytest.mark.slow
def test_invalid_parquet_is_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.parquet").write_bytes(b"a,b\n1,2\n")
    spec = ParquetTable(**section(root=tmp_path / "a.parquet", target="b"))
    with pytest.raises(DataError, match=r"a.parquet: can't be read as Parquet"):
        spec.read(tmp_path)
    pq.write_table(pa.table({"a": [[1], [2]], "b": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: a is list<.*>; must be numbers or texts"):
        spec.read(tmp_path)
    pq.write_table(pa.table({"a": [1, float("inf")], "b": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: row 2: a = inf: must be a number of at most"):
        spec.read(tmp_path)


def test_rare_class_is_noted_with_what_helps(tmp_path: Path) -> None:
    rows = [f"{n},{'rare' if n % 50 == 0 else 'usual'},{n % 7}" for n in range(200)]
    text = "\n".join(["size,kind,code", *rows]) + "\n"
    fields = {"target": "kind", "ignored": ["size"]}
    (note,) = read(tmp_path, text, **fields).notes
    assert note.startswith("class rare has 4 of 160 training rows (2.5%), so the accuracy hardly")
    assert "train.loss.class_weights=balanced" in note
    assert "eval.metrics=[balanced_accuracy]" in note
    even = text.replace("usual", "rare", 80)
    assert read(tmp_path, even, **fields).notes == ()
