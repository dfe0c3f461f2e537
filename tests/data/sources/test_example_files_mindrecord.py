"""Datasets in MindRecord files (D-13)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.records.example_images import ExampleSettings, _find_layout
from pipeline.data.sources.example_files import MindRecord
from tests.data.records.test_mindrecord_file import GOLDEN
from tests.data.section import section


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with ZipFile(GOLDEN) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def read(folder: Path, **settings: Any) -> RawData:
    return MindRecord(**section(root=folder, **settings)).read(folder / "cache")


def test_images_of_all_shards_are_read(folder: Path) -> None:
    raw = read(folder)
    assert raw.train.files == (4, 4, 4)
    assert raw.train.columns["image"].shape == (12, 6, 5, 3)
    assert raw.train.columns["label"][:].tolist() == [n % 3 for n in range(12)]
    images = raw.train.columns["image"][:4]
    np.testing.assert_array_equal(images, raw.eval.columns["image"][:])
    assert images.dtype == np.uint8
    assert images.std() > 50


def test_arrays_are_images_and_numbers_are_a_regression(folder: Path) -> None:
    settings = {"train_files": "arrays*", "split": 0.5, "label_key": "score"}
    raw = read(folder, image_key="f32", **settings)
    assert raw.train.specs()["image"].shape == (2, 3, 1)
    assert raw.train.specs()["image"].dtype == "float32"
    assert raw.targets.task == "regression"
    with pytest.raises(DataError, match="record 0: i64 has values that int32 can't hold"):
        read(folder, image_key="i64", train_files="arrays*", split=0.5, label_key="label")


def test_tokens_become_an_integer_input(folder: Path) -> None:
    raw = read(folder, train_files="tokens*", split=0.5, image_key="ids")
    assert raw.train.specs()["tokens"].shape == (8,)
    assert raw.train.specs()["tokens"].dtype == "int32"


def test_missing_index_is_named_with_its_file(folder: Path) -> None:
    (folder / "train.mindrecord1.db").unlink()
    with pytest.raises(DataError, match=r"train.mindrecord1: needs its index train.mindrecord1.db"):
        read(folder)


def test_index_outside_the_folder_is_refused(folder: Path, tmp_path_factory: Any) -> None:
    index = folder / "train.mindrecord1.db"
    outside = tmp_path_factory.mktemp("outside") / "index.db"
    index.rename(outside)
    index.symlink_to(outside)
    with pytest.raises(DataError, match=r"train.mindrecord1.db: leads out of"):
        read(folder)


def test_numbers_beyond_float32_and_int32_are_refused() -> None:
    lowest = {"data": np.array([-(2**63), 3]), "label": np.array([1])}
    with pytest.raises(ValueError, match="data has values that int32 can't hold"):
        _find_layout(lowest, ExampleSettings())
    price = {"data": np.ones(2), "label": np.array([1e300])}
    with pytest.raises(ValueError, match="must be finite"):
        _find_layout(price, ExampleSettings()).read_label(price)
