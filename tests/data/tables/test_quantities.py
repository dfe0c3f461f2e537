from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.sources.tabular import CsvTable
from pipeline.data.table import FittedTable
from pipeline.data.tables.fit_table import read_encoded_rows
from pipeline.data.tables.quantities import parse_quantity
from tests.data.section import section


@pytest.mark.parametrize(
    ("text", "decimal", "expected"),
    [
        ("$1,000", ".", (1000, "$")),
        ("5 kg", ".", (5, "kg")),
        ("-5kg", ".", (-5, "kg")),
        ("1,234,567.5", ".", (1234567.5, "")),
        ("1.234,5", ",", (1234.5, "")),
        ("1\u202f000,5 €", ",", (1000.5, "€")),
        ("1'000 CHF", ".", (1000, "CHF")),
        ("CHF 1’000", ".", (1000, "CHF")),
        ("-$5", ".", (-5, "$")),
        ("$-5", ".", (-5, "$")),
        ("US$ .5", ".", (0.5, "US$")),
        ("−3 °C", ".", (-3, "°C")),
        ("12.5 %", ".", (12.5, "%")),
        ("3 m/s^2", ".", (3, "m/s^2")),
        ("12 sq ft", ".", (12, "sq ft")),
    ],
)
def test_quantity_has_number_and_unit(text: str, decimal: str, expected: tuple[float, str]) -> None:
    assert parse_quantity(text, decimal) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("kg", "5 kg 3", "model 3", "1,00", "1,0000", "1,000'000", "1.2.3", "10:30", "12-45"),
        *("31 Jan 2024", "$5 kg", "--5", "-$-5", "5_000 kg", "٥ kg", "", "12.jpg", "5 6"),
        *("9" * 400, "9" * 59 + "x" * 9),
    ],
)
def test_other_texts_are_not_quantities(text: str) -> None:
    assert parse_quantity(text, ".") is None


ROWS = "\n".join(f'"${n % 7 + 1},{n:03}",{n} kg,{n % 2 * 250 + 250} ml' for n in range(40))
TABLE = f"price,weight,size\n{ROWS}\n"


def read(folder: Path, text: str = TABLE, **fields: Any) -> RawData:
    (folder / "mine.csv").write_text(text)
    written = {"root": folder / "mine.csv", "target": "price", **fields}
    return CsvTable(**section(**written)).read(folder / "cache")


def fit(folder: Path, text: str = TABLE, **fields: Any) -> FittedTable:
    table = read(folder, text, **fields).table
    assert table is not None
    return table


def test_columns_with_a_unit_are_numbers(tmp_path: Path) -> None:
    data = read(tmp_path)
    assert data.targets.task == "regression"
    splits = [np.asarray(split.columns["label"]) for split in (data.train, data.eval)]
    prices = data.targets.to_data_units(np.concatenate(splits))[:, 0]
    expected = [1000 * (n % 7 + 1) + n for n in range(40)]
    np.testing.assert_allclose(np.sort(prices), np.sort(expected), rtol=1e-5)
    assert data.table is not None
    assert [(column.name, column.unit) for column in data.table.columns] == [
        ("weight", "kg"),
        ("size", "ml"),
    ]
    assert data.notes[:2] == (
        "column price: numbers in $, $1,000 is read as 1000; dataset.categories=[price] reads "
        "texts",
        "column weight: numbers in kg, 0 kg is read as 0; dataset.categories=[weight] reads texts",
    )


def test_unit_can_be_a_category(tmp_path: Path) -> None:
    table = fit(tmp_path, categories=["size"])
    assert table.categories[0].categories == ("250 ml", "500 ml")


def test_classes_keep_their_unit(tmp_path: Path) -> None:
    assert read(tmp_path, target="size").targets.names == ("250 ml", "500 ml")
    (tmp_path / "eval.csv").write_text('price,weight,size\n"$1,000",3 kg,500 ml\n')
    data = read(tmp_path, target="size", eval_path=tmp_path / "eval.csv")
    assert np.asarray(data.eval.columns["label"]).tolist() == [1]


def test_several_units_are_categories_and_noted(tmp_path: Path) -> None:
    text = "a,b\n" + "\n".join(f"{n},{n % 3} {'kg' if n % 3 else 'g'}" for n in range(30))
    data = read(tmp_path, text, target="a")
    assert data.notes[-1] == ("column b: has numbers in several units, g, kg, read as categories")
    with pytest.raises(DataError, match="line 2: b = '0 g': must be a number in kg, as in other"):
        read(tmp_path, text, target="a", numeric=["b"])


@pytest.mark.parametrize(("decimal", "mark"), [(".", ","), (",", ".")])
def test_mark_of_other_decimals_is_noted(tmp_path: Path, decimal: str, mark: str) -> None:
    file = tmp_path / "a.csv"
    rows = "".join(f"{n}{mark}25 €;{n};{n % 2}\n" for n in range(20))
    file.write_text(f"price;b;label\n{rows}")
    notes = CsvTable(**section(root=file, target="label", decimal=decimal)).read(tmp_path).notes
    said = [note for note in notes if "decimal mark" in note]
    argument = f"""'++dataset.decimal="{mark}"'"""
    assert said == [
        f"column price: has numbers whose decimal mark is {mark!r}, read as categories; {argument} "
        "reads them"
    ]
    fitting = CsvTable(**section(root=file, target="label", decimal=mark)).read(tmp_path).notes
    assert not any("decimal mark" in note for note in fitting)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("5 lb", "weight = '5 lb': must be in kg, as in the training split"),
        ("heavy", "line 2: weight = 'heavy': must be a number"),
    ],
)
def test_new_rows_have_the_same_unit(tmp_path: Path, weight: str, message: str) -> None:
    table = fit(tmp_path)
    (tmp_path / "new.csv").write_text(f"weight,size\n{weight},250 ml\n")
    with pytest.raises(DataError, match=message):
        read_encoded_rows(tmp_path / "new.csv", table)
    rows = []
    for plain in ("5", "5 kg"):
        (tmp_path / "new.csv").write_text(f"weight,size\n{plain},250 ml\n")
        rows.append(read_encoded_rows(tmp_path / "new.csv", table)[0])
    np.testing.assert_array_equal(rows[0], rows[1])


def test_target_of_new_rows_has_the_same_unit(tmp_path: Path) -> None:
    (tmp_path / "eval.csv").write_text('price,weight,size\n"€1,000",3 kg,500 ml\n')
    with pytest.raises(DataError, match=r"price = '€1,000': must be in \$, as in the training"):
        read(tmp_path, eval_path=tmp_path / "eval.csv")


def test_number_beyond_float32_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 42: weight = 1e\+39: must be a number of at most"):
        read(tmp_path, TABLE + '"$1,000",1' + "0" * 39 + " kg,250 ml\n")
