"""Samples that a recipe selects: skip, take, classes, cleaning and custom rules (D-19)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from pipeline.api import Selection
from pipeline.core.errors import DataError
from pipeline.data.columns import RawData, Split, Targets
from pipeline.data.selections import (
    Classes,
    Readable,
    SkipFirst,
    TakeFirst,
    Unique,
    apply_selections,
    exclude_samples,
)
from pipeline.data.sources.image_folder import ImageFolder
from tests.data.section import section
from tests.image_folders import save_images


def make_data(samples: int = 12) -> RawData:
    """Images whose values are their rows, but every fourth equals the one before it."""
    numbers = np.arange(samples) - (np.arange(samples) % 4 == 3)
    images = np.broadcast_to(numbers[:, None, None, None], (samples, 2, 2, 1)).astype(np.uint8)
    labels = (np.arange(samples) % 3).astype(np.int32)
    split = Split({"image": images, "label": labels}, files=(5, samples - 5))
    return RawData(split, split, Targets(("a", "b", "c")))


def select(*rules: Selection, data: RawData | None = None) -> list[int]:
    raw = apply_selections(rules, make_data() if data is None else data, "train")
    return [int(image.max()) for image in raw.train.columns["image"][:]]


def test_selection_rules_apply_in_sequence() -> None:
    assert select(SkipFirst(samples=2), TakeFirst(samples=3)) == [2, 2, 4]
    assert select(TakeFirst(samples=3), SkipFirst(samples=2)) == [2]
    assert select(TakeFirst(samples=99)) == select()
    assert select(Classes(keep=("a", 2)), TakeFirst(samples=4)) == [0, 2, 2, 5]


def test_selections_update_notes_and_samples_per_file() -> None:
    raw = apply_selections([SkipFirst(samples=3), Unique()], make_data(), "train")
    assert raw.notes == (
        "train.select.0 (skip): 9 of 12 images",
        "train.select.1 (unique): 7 of 9 images",
    )
    assert raw.train.files == (2, 5)
    assert len(raw.eval) == 12


def test_naive_error_of_all_samples_is_not_that_of_some() -> None:
    data = make_data()
    data = replace(data, targets=replace(data.targets, naive_mae=2.0))
    for key, naive_mae in (("train", 2.0), ("eval", None)):
        found = apply_selections([TakeFirst(samples=3)], data, key)
        assert found.targets.naive_mae == naive_mae


def test_unique_keeps_one_of_equal_samples() -> None:
    assert select(Unique()) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    raw = apply_selections([TakeFirst(samples=5)], make_data(), "train")
    raw = apply_selections([Unique(apart=True)], raw, "eval")
    assert raw.eval.columns["image"][:, 0, 0, 0].tolist() == [5, 6, 8, 9, 10]


class Odd(Selection):
    """A custom rule, which returns a mask."""

    name: Literal["odd"] = "odd"

    def select(self, split: Split, raw: RawData) -> Any:
        return np.asarray(split.columns["image"][:])[:, 0, 0, 0] % 2 == 1


class Wrong(Selection):
    name: Literal["wrong"] = "wrong"
    rows: Any

    def select(self, split: Split, raw: RawData) -> Any:
        return np.array(self.rows) / 0 if self.rows is None else np.array(self.rows)


def test_custom_rule_is_applied() -> None:
    assert select(Odd()) == [1, 5, 9]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (SkipFirst(samples=12), r"select.0 \(skip\): leaves none of 12 samples"),
        (Classes(keep=("x",)), r"select.0 \(classes\): keep = 'x': there is no such class"),
        (Classes(keep=(3,)), r"keep = 3: there is no such class; they are a, b, c"),
        (Unique(column="mask"), "column = mask: there is no such column"),
        (Wrong(rows=[0, 12]), r"select.0 \(wrong\): IndexError: index 12 is out of bounds"),
        (Wrong(rows=None), r"select.0 \(wrong\): TypeError"),
        (Wrong(rows=[[0, 1], [2, 3]]), r"returned int64\[2, 2\]; must be whole numbers or bools"),
        (Wrong(rows=[0.9, 1.7]), r"returned float64\[2\]; must be whole numbers"),
        (Wrong(rows=[]), r"select.0 \(wrong\): leaves none of 12 samples"),
    ],
)
def test_unfit_rules_are_refused(rule: Selection, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(rule)


def test_classes_need_labels_of_one_class_each() -> None:
    split = Split({"image": np.zeros((2, 2, 2, 1), np.uint8)})
    raw = RawData(split, split, Targets(("a", "b")))
    with pytest.raises(ValueError, match=r"select.0 \(classes\): classes: needs samples"):
        select(Classes(keep=("a",)), data=raw)


def test_some_of_many_classes_are_listed() -> None:
    raw = replace(make_data(), targets=Targets(tuple(f"c{number}" for number in range(50))))
    with pytest.raises(ValueError, match=r"no such class; they are c0, c1, .*, c9 and 40 more$"):
        select(Classes(keep=("x",)), data=raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"a\nb",index\n1,2\n3,x\n', "line 4: x: must be"),
        ('name,index\n"a\nb",2\n3,x\n', "line 4: x: must be"),
        ("\n\nindex\n1\nx\n", "line 5: x: must be"),
        ("\n1,2\n", "line 2: has 2 values"),
    ],
)
def test_lines_of_a_file_of_exclusions_are_the_files(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "exclude.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        exclude_samples(make_data(), file, 12)


def test_header_may_come_after_empty_lines(tmp_path: Path) -> None:
    file = tmp_path / "exclude.csv"
    file.write_text("\n\nname,index\na,11\n\nb,0\n")
    assert len(exclude_samples(make_data(), file, 12).train) == 10


def test_damaged_files_are_omitted_if_the_recipe_allows_it(tmp_path: Path) -> None:
    save_images(tmp_path, {"train": 3, "eval": 3})
    damaged = [tmp_path / "train/ant/00.png", tmp_path / "train/owl/02.png"]
    whole = damaged[1].read_bytes()
    damaged[0].write_bytes(b"no image")
    damaged[1].write_bytes(whole[: len(whole) // 2])

    def read(**keys: Any) -> RawData:
        fields = section(root=tmp_path)
        spec = ImageFolder(**{**fields, "train": {**fields["train"], **keys}})
        return apply_selections(spec.train.select, spec.read(tmp_path), "train")

    with pytest.raises(DataError, match=r"00.png: can't be read as an image"):
        read()
    raw = read(select=[{"name": "readable"}])
    assert raw.train.columns["image"].shape[0] == 4
    assert raw.train.columns["label"][:].tolist() == [0, 0, 1, 1]
    assert raw.notes == ("train.select.0 (readable): 4 of 6 images",)
    assert raw.train.columns["image"][:].shape == raw.train.columns["image"].shape


def test_columns_in_memory_are_always_readable() -> None:
    assert select(Readable()) == select()
