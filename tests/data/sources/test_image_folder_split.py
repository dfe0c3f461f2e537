"""Images in one folder of classes, and images named in CSV files: splits, tasks, bad input."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.sources.image_folder import ImageFolder
from tests.data.section import section


def save(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(path)


def values(data: RawData) -> tuple[list[int], list[int]]:
    """The grey level of each image of both splits."""
    splits = (data.train, data.eval)
    train, evaluated = ([int(x) for x in s.columns["image"][:][:, 0, 0, 0]] for s in splits)
    return train, evaluated


def labels(data: RawData) -> tuple[Any, Any]:
    return tuple(split.columns["label"][:].tolist() for split in (data.train, data.eval))  # type: ignore[return-value]


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """Ten ants of values 0 to 9, and twenty owls of values 100 to 119."""
    for number in range(10):
        save(tmp_path / "ant" / f"{number}.png", number)
    for number in range(20):
        save(tmp_path / "owl" / f"{number:02}.png", 100 + number)
    return tmp_path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of twelve images whose values are their numbers."""
    for number in range(12):
        save(tmp_path / "photos" / f"{number}.png", number)
    return tmp_path / "photos"


def read(root: Path, **fields: Any) -> RawData:
    return ImageFolder(**section(root=root, **fields)).read(root / "cache")


def table(folder: Path, *rows: str, name: str = "labels.csv") -> Path:
    (folder / name).write_text("\n".join(rows) + "\n")
    return folder / name


def test_split_is_stratified_by_class(classes: Path) -> None:
    data = read(classes, split=0.2)
    train, evaluated = values(data)
    assert data.classes == ("ant", "owl")
    assert sorted([*train, *evaluated]) == [*range(10), *range(100, 120)]
    assert labels(data) == ([v // 100 for v in train], [v // 100 for v in evaluated])
    assert (labels(data)[1].count(0), labels(data)[1].count(1)) == (2, 4)


def test_split_has_a_separate_seed(classes: Path) -> None:
    first, again = values(read(classes, split=0.2)), values(read(classes, split=0.2))
    assert first == again
    assert first != values(read(classes, split=0.2, split_seed=1))


def test_split_of_a_folder_with_splits_is_refused(tmp_path: Path) -> None:
    for name in ("train", "eval"):
        save(tmp_path / name / "ant" / "0.png", 0)
    with pytest.raises(DataError, match=r"has the folders train and eval, so that dataset.split"):
        read(tmp_path, split=0.2)


def test_flat_folder_without_a_split_is_refused_with_a_hint(classes: Path) -> None:
    with pytest.raises(DataError, match=r"must have the folders train .* dataset.split=0.2 holds"):
        read(classes)


def test_class_of_one_image_is_refused(classes: Path) -> None:
    save(classes / "bee" / "0.png", 1)
    with pytest.raises(DataError, match="bee has 1 sample; a split needs at least 2 of each class"):
        read(classes, split=0.2)


def test_labels_csv_of_classes_is_read(photos: Path) -> None:
    rows = [f"{number}.png,{('owl', 'ant')[number % 2]}" for number in range(12)]
    data = read(photos, labels_csv=table(photos, "file,kind", *rows), split=0.25)
    train, evaluated = values(data)
    assert data.classes == ("ant", "owl")
    assert (len(train), len(evaluated)) == (8, 4)
    assert labels(data) == ([1 - v % 2 for v in train], [1 - v % 2 for v in evaluated])
    assert data.train.columns["label"].dtype == np.int32


def test_numeric_classes_are_in_numeric_order(photos: Path) -> None:
    rows = [f"{number}.png,{(2, 10, 9)[number % 3]}" for number in range(12)]
    data = read(photos, labels_csv=table(photos, "file,kind", *rows), split=0.25)
    assert data.classes == ("2", "9", "10")


def test_columns_are_selected_by_name(photos: Path) -> None:
    rows = [f"x,{number}.png,{number / 4},note" for number in range(12)]
    csv = table(photos, "id,file,age,text", *rows)
    data = read(photos, labels_csv=csv, split=0.25, path_column="file", label_columns=["age"])
    train, evaluated = values(data)
    assert (data.targets.task, data.targets.names) == ("regression", ("age",))
    for own, seen in zip(labels(data), (train, evaluated), strict=True):
        restored = data.targets.to_data_units(np.array(own))[:, 0]
        np.testing.assert_allclose(restored, np.array(seen) / 4, atol=1e-6)
    standardised = np.array(labels(data)[0])
    assert (standardised.mean(), standardised.std()) == pytest.approx((0, 1), abs=1e-6)


def test_several_numeric_columns_are_a_regression(photos: Path) -> None:
    rows = [f"{number}.png,{number},{-number / 3:.3f}" for number in range(12)]
    data = read(photos, labels_csv=table(photos, "file,x,y", *rows), split=0.25)
    assert (data.targets.task, data.targets.names) == ("regression", ("x", "y"))
    assert data.train.columns["label"].shape == (9, 2)


def test_several_flag_columns_are_multi_label(photos: Path) -> None:
    rows = [f"{number}.png,{number % 2},{number % 3 == 0:d}" for number in range(12)]
    data = read(photos, labels_csv=table(photos, "file,odd,three", *rows), split=0.25)
    train, _ = values(data)
    assert (data.targets.task, data.targets.names) == ("multi_label", ("odd", "three"))
    assert labels(data)[0] == [[v % 2, float(v % 3 == 0)] for v in train]
    assert data.train.columns["label"].dtype == np.float32


def test_eval_csv_is_the_evaluation_split(photos: Path) -> None:
    first = table(photos, "file,kind", *[f"{n}.png,{n % 2}" for n in range(8)])
    second = table(photos, "file,kind", *[f"{n}.png,{n % 2}" for n in range(8, 12)], name="e.csv")
    data = read(photos, labels_csv=first, eval_csv=second)
    assert values(data) == (list(range(8)), [8, 9, 10, 11])
    assert labels(data) == ([n % 2 for n in range(8)], [0, 1, 0, 1])


def test_byte_order_mark_and_blank_lines_are_ignored(photos: Path) -> None:
    rows = "".join(f"{n}.png,{n % 2}\r\n\r\n" for n in range(12))
    (photos / "l.csv").write_bytes(b"\xef\xbb\xbffile,kind\r\n" + rows.encode())
    data = read(photos, labels_csv=photos / "l.csv", split=0.25, path_column="file")
    assert len(data.train) + len(data.eval) == 12


GOOD = [f"{number}.png,{number % 2}" for number in range(12)]


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([], {}, "is empty; its first row must name the columns"),
        (["file,kind"], {}, "has no rows below the names of its columns"),
        (["file", "1.png"], {}, "has only the column file; labels need another column"),
        (["file,file", *GOOD], {}, "has several columns file; names must be different"),
        (
            ["file,kind", *GOOD],
            {"label_columns": ["age"]},
            "has no column age, which label_columns names; it has file, kind",
        ),
        (["file,kind", *GOOD], {"path_column": "path"}, "no column path, which path_column names"),
        (
            ["file,kind", *GOOD],
            {"label_columns": ["file"]},
            "file must not be both the path and a label",
        ),
        (["file,kind", *GOOD, "3.png,1,2"], {}, "row 14 has 3 values for 2 columns"),
        (
            ["file,kind", *GOOD, "3.png, ", "4.png,"],
            {},
            "kind is empty in 2 of 14 rows, first in row 14; every image needs a label",
        ),
        (
            ["file,kind", "0.png,1", "a.png,1", "1.png,0", "b.png,0"],
            {},
            r"2 of 4 images are not in .*photos; the first is a.png, in row 3",
        ),
        (["", "file,kind", "", "0.png,1", "../up.png,1"], {}, r"row 5: \.\./up\.png leads out"),
        (["file,kind", "a,1", "", "b,"], {}, r"kind is empty in 1 of 2 rows, first in row 4"),
        (["file,kind", "", "0.png"], {}, r"row 3 has 1 values for 2 columns"),
        (["file,kind", "0.png,1", "../up.png,1"], {}, r"row 3: \.\./up\.png leads out of .*photos"),
        (["file,kind", "0.png,1", "/etc/hosts,1"], {}, r"row 3: /etc/hosts leads out of .*photos"),
        (["file,kind", "0.png,1", "a/../../u,1"], {}, r"row 3: a/\.\./\.\./u leads out of"),
        (["file,kind", "0.png,1", "link.png,1"], {}, r"row 3: link\.png leads out of"),
        (["file,kind", "0.png,1", ".,1"], {}, r"row 3: \. leads out of"),
        (["file,kind", '"0.png,1'], {}, "isn't a CSV: "),
        (
            ["file,a,b", "0.png,1,x", "1.png,0.5,y"],
            {},
            "b has x, which isn't a number",
        ),
        (["file,a", "0.png,1.5", "1.png,nan"], {}, "a has nan; must be finite"),
        (["file,a", *[f"{n}.png,1.5" for n in range(9)]], {}, "a is the same in all training"),
        (
            ["file,a,b", *[f"{n}.png,1,2" for n in range(9)]],
            {"task": "multi_label"},
            "b has the value 2; multi_label needs 0 or 1",
        ),
        (
            ["file,a,b", *[f"{n}.png,1,2" for n in range(9)]],
            {"task": "classification"},
            "classes are in one column, not in a, b; name it in label_columns, or set task",
        ),
        (["file,kind", *GOOD, "3.png,7"], {}, "7 has 1 sample; a split needs at least 2"),
    ],
)
def test_unfit_labels_csv_is_refused(
    rows: list[str], fields: dict[str, Any], message: str, photos: Path
) -> None:
    save(photos.parent / "up.png", 1)
    os.symlink(photos.parent / "up.png", photos / "link.png")
    csv = table(photos, *rows) if rows else photos / "labels.csv"
    if not rows:
        csv.write_text("")
    with pytest.raises(DataError, match=rf"labels\.csv: .*{message}"):
        read(photos, labels_csv=csv, split=0.25, **fields)


def test_link_is_followed_on_request(photos: Path) -> None:
    save(photos.parent / "up.png", 77)
    os.symlink(photos.parent / "up.png", photos / "link.png")
    csv = table(photos, "file,kind", *GOOD, "link.png,1")
    data = read(photos, labels_csv=csv, split=0.25, follow_links=True)
    assert 77 in [*values(data)[0], *values(data)[1]]


def test_missing_labels_csv_is_named(photos: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv: can't be read: No such file or directory"):
        read(photos, labels_csv=photos / "none.csv", split=0.25)


def test_class_only_in_evaluation_is_refused(photos: Path) -> None:
    first = table(photos, "file,kind", *GOOD[:8])
    second = table(photos, "file,kind", "9.png,1", "8.png,x", name="e.csv")
    with pytest.raises(DataError, match=r"e\.csv: has the class x, which .*labels\.csv lacks"):
        read(photos, labels_csv=first, eval_csv=second)


def test_tables_of_other_columns_are_refused(photos: Path) -> None:
    first = table(photos, "file,kind", *GOOD[:8])
    second = table(photos, "file,sort", *GOOD[8:], name="e.csv")
    with pytest.raises(DataError, match="must have the same columns to predict, not kind and sort"):
        read(photos, labels_csv=first, eval_csv=second)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eval_csv": "b.csv"}, "eval_csv = b.csv: needs labels_csv"),
        ({"labels_csv": "a.csv"}, "labels_csv = a.csv: needs either split, .* or eval_csv"),
        ({"labels_csv": "a.csv", "eval_csv": "b.csv", "split": 0.1}, "needs either split"),
        ({"split": 1.0}, "less than 1"),
    ],
)
def test_section_without_exactly_one_split_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ImageFolder(**section(root="x", **fields))
