from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.columns import RawData
from pipeline.data.sources.tabular import CsvTable
from pipeline.data.tables.fit_table import read_encoded_rows
from pipeline.data.tables.identifiers import Identifier, _predict_from_neighbours, find_identifiers
from pipeline.data.tables.raw_table import RawTable
from tests.data.section import section

ROWS = 600


def find(numbers: np.ndarray, labels: np.ndarray, classes: int | None = None) -> list[Identifier]:
    raw = RawTable({"a": numbers.astype(float)}, ("a",), len(numbers), str)
    return list(find_identifiers(raw, ["a"], np.arange(len(numbers)), labels, classes))


def draw(seed: int, values: int) -> tuple[np.random.Generator, np.ndarray]:
    random = np.random.default_rng(seed)
    return random, random.integers(0, values, ROWS)


@pytest.mark.parametrize("seed", range(20))
def test_school_is_found_with_its_share_of_the_variance(seed: int) -> None:
    random, school = draw(seed, 40)
    effects = random.normal(size=40)
    labels = effects[school] + random.normal(size=ROWS)
    (found,) = find(school, labels[:, None])
    assert (found.name, found.values) == ("a", 40)
    share = effects[school].var() / labels.var()
    assert found.explained == pytest.approx(share, abs=0.1)


def test_numbers_of_64_bits_beside_a_zero_are_no_identifier() -> None:
    random = np.random.default_rng(0)
    numbers = np.repeat([0.0, *(1e18 + 128 * np.arange(14))], 20)
    assert not find(numbers, np.repeat(random.normal(size=15), 20)[:, None])


SMOOTH: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "nothing": lambda x: 0 * x,
    "a line": lambda x: x / 10,
    "a square": lambda x: (x / 10 - 2) ** 2,
    "a wave": lambda x: np.sin(x / 6),
    "a step": lambda x: 1.0 * (x > 20),
    "an exponential": lambda x: np.exp(x / 10),
}


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", SMOOTH)
def test_measure_is_no_identifier(name: str, noise: float) -> None:
    """In none of 20 tables, without noise and with as much of it as of signal."""
    for seed in range(20):
        random, age = draw(seed, 40)
        labels = SMOOTH[name](age) + noise * random.normal(size=ROWS)
        assert not find(age, labels[:, None])


def test_values_that_decide_the_class_are_found() -> None:
    """Without any noise, which the test of the distances divides by."""
    random, school = draw(0, 40)
    labels = random.integers(0, 3, 40)[school]
    (found,) = find(school, labels, classes=3)
    assert found.explained == pytest.approx(1)


def test_order_of_rows_and_missing_numbers_change_nothing() -> None:
    random, school = draw(1, 40)
    numbers = school.astype(float)
    labels = random.normal(size=(40, 2))[school] + random.normal(size=(ROWS, 2))
    (found,) = find(numbers, labels)
    order = random.permutation(ROWS)
    (again,) = find(numbers[order], labels[order])
    assert (again.values, again.explained) == (found.values, pytest.approx(found.explained))
    with_gaps = np.append(numbers, [np.nan] * 50)
    (again,) = find(with_gaps, np.append(labels, np.full((50, 2), labels.mean(0)), axis=0))
    assert again.explained == pytest.approx(found.explained, abs=0.03)


@pytest.mark.parametrize(
    "numbers",
    [
        np.arange(ROWS) % 10,
        np.arange(ROWS) // 1.9,
        np.arange(ROWS) % 40 + 0.5,
        np.full(ROWS, np.nan),
        np.zeros(ROWS),
    ],
    ids=["few values", "few rows a value", "halves", "missing", "equal"],
)
def test_other_numbers_are_no_identifiers(numbers: np.ndarray) -> None:
    effects = np.random.default_rng(2).normal(size=1000)
    labels = effects[np.nan_to_num(numbers).astype(int)]
    assert not find(numbers, labels[:, None])


def test_neighbours_predict_a_line_exactly_also_at_its_ends() -> None:
    random = np.random.default_rng(6)
    values = np.cumsum(random.integers(1, 9, 20)).astype(float)
    counts = random.integers(1, 30, 20)
    line = np.stack([values, 5 - 3 * values], axis=1)
    expected, factors = _predict_from_neighbours(values, line, counts)
    np.testing.assert_allclose(expected, line, atol=1e-10)
    # The mean of one row of each neighbour is nowhere nearer to a line without noise.
    assert (factors > 1 / counts.sum()).all()


def test_equal_labels_explain_nothing() -> None:
    assert not find(np.arange(ROWS) % 40, np.full((ROWS, 1), 0.1))
    assert not find(np.arange(ROWS) % 40, np.zeros(ROWS, np.int32), classes=1)


def test_labels_that_are_equal_where_numbers_are_present_explain_nothing() -> None:
    """Their common distance from the mean of all rows isn't explained by the numbers."""
    random = np.random.default_rng(7)
    numbers = np.where(np.arange(ROWS) % 2, np.nan, np.arange(ROWS) // 2 % 40)
    labels = np.where(np.isnan(numbers), np.arange(ROWS) % 3, 1.0)
    assert labels.mean() == 1.0
    assert not find(numbers, labels[:, None])
    noise = random.normal(size=ROWS)
    offset = np.where(np.isnan(numbers), noise, 50 + noise)
    assert not find(numbers, offset[:, None])
    effects = random.normal(size=40)[np.nan_to_num(numbers).astype(int)]
    (found,) = find(numbers, np.where(np.isnan(numbers), noise, 50 + effects)[:, None])
    assert found.explained == pytest.approx(1)


def test_memory_does_not_grow_with_the_number_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.data.tables.identifiers.MOST_CELLS", 30_000)
    random, school = draw(8, 12)
    labels = random.integers(0, 100, 12)[school]
    (found,) = find(school, labels, classes=100)
    assert found.values == 12
    monkeypatch.setattr("pipeline.data.tables.identifiers.MOST_CELLS", 50)
    assert not find(school, labels, classes=100)


def write(path: Path, school: np.ndarray, score: np.ndarray, form: str = "%d") -> Path:
    with path.open("w", newline="") as file:
        rows = ([form % number, value] for number, value in zip(school, score, strict=True))
        csv.writer(file).writerows([["school", "score"], *rows])
    return path


def read(path: Path, **settings: Any) -> RawData:
    return CsvTable(**section(root=path, target="score", **settings)).read(path.parent)


def test_identifiers_are_read_as_the_recipe_says(tmp_path: Path) -> None:
    random, school = draw(3, 40)
    path = write(tmp_path / "a.csv", school, random.normal(size=40)[school])
    data = read(path)
    assert data.table is not None
    assert [column.kind for column in data.table.columns] == ["numeric"]
    (note,) = data.notes
    assert note == (
        "column school: its 40 whole numbers explain 100% of the target, and not by their order, "
        "as a school's number does; read as numbers, dataset.categories=[school] reads it as "
        "categories"
    )
    data = read(path, identifiers="categories")
    assert data.table is not None
    (column,) = data.table.columns
    assert (column.kind, len(column.categories)) == ("category", 40)
    assert "read as categories, dataset.numeric=[school] reads it as numbers" in data.notes[0]
    for settings in ({"numeric": ("school",)}, {"categories": ("school",)}):
        assert not read(path, identifiers="categories", **settings).notes

    # Another program writes the same numbers otherwise.
    rows, _ = read_encoded_rows(path, data.table)
    floats = write(tmp_path / "b.csv", school, school, form="%.1f")
    np.testing.assert_array_equal(read_encoded_rows(floats, data.table)[0], rows)
    assert set(rows[:, 0]) == set(range(1, 41))
    other = write(tmp_path / "c.csv", np.array([40, 7]), np.zeros(2))
    encoded, _ = read_encoded_rows(other, data.table)
    assert encoded[:, 0].tolist() == [0, column.categories.index("7") + 1]
    assert read_encoded_rows(path, type(data.table)(**data.table.to_dict()))[0].tobytes() == (
        rows.tobytes()
    )


def test_many_rows_are_sampled_evenly() -> None:
    """A file that is sorted by the column has all of its values among the rows looked at."""
    school = np.sort(np.random.default_rng(4).integers(0, 60, 250_000))
    labels = np.random.default_rng(5).normal(size=60)[school]
    (found,) = find(school, labels[:, None])
    assert found.values == 60
