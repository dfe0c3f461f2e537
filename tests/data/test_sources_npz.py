from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.data.columns import RawData
from pipeline.data.sources.npz import NumpyArchive, split_arrays
from pipeline.errors import DataError
from tests.data.section import section


def arrays(**changes: Any) -> dict[str, Any]:
    grey = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    good = {
        "x_train": grey,
        "y_train": np.array([0, 2, 1, 0, 2]),
        "x_test": grey[:2] + 1,
        "y_test": np.array([1, 0]),
    }
    return {name: value for name, value in {**good, **changes}.items() if value is not None}


def read(folder: Path, classes: int | None = None, **changes: Any) -> RawData:
    path = folder / "mine.npz"
    np.savez(path, **arrays(**changes))
    return NumpyArchive(**section(root=path, classes=classes)).read(folder / "cache")


def test_arrays_become_columns(tmp_path: Path) -> None:
    data = read(tmp_path)

    np.testing.assert_array_equal(
        data.train.columns["image"][:], arrays()["x_train"][:, :, :, np.newaxis]
    )
    np.testing.assert_array_equal(
        data.eval.columns["image"][:], arrays()["x_test"][:, :, :, np.newaxis]
    )
    assert data.train.columns["label"][:].tolist() == [0, 2, 1, 0, 2]
    assert data.eval.columns["label"][:].tolist() == [1, 0]
    assert data.train.columns["label"].dtype == np.int32
    assert data.classes == ("0", "1", "2")


def test_colour_images_of_float_stay_as_they_are(tmp_path: Path) -> None:
    images = np.linspace(-1, 1, 5 * 4 * 3 * 2, dtype=np.float32).reshape(5, 4, 3, 2)

    data = read(tmp_path, x_train=images, x_test=images[:2])

    assert data.train.columns["image"].dtype == np.float32
    np.testing.assert_array_equal(data.train.columns["image"][:], images)


def test_labels_in_a_column_are_taken(tmp_path: Path) -> None:
    data = read(tmp_path, y_train=np.array([[0], [2], [1], [0], [2]], np.uint8))

    assert data.train.columns["label"][:].tolist() == [0, 2, 1, 0, 2]


def test_a_sample_can_have_a_label_at_every_position(tmp_path: Path) -> None:
    masks = np.arange(5 * 4 * 3).reshape(5, 4, 3) % 7

    data = read(tmp_path, y_train=masks, y_test=masks[:2])

    np.testing.assert_array_equal(data.train.columns["label"][:], masks)
    assert data.train.columns["label"].dtype == np.int32
    assert len(data.classes) == 7


def test_classes_can_be_more_than_the_labels_show(tmp_path: Path) -> None:
    assert len(read(tmp_path, classes=7).classes) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None, "x_test": None}, "lacks x_test, y_test; it has x_train, y_train"),
        ({"x_test": np.array([{}, []], object)}, "x_test can't be read: Object arrays cannot"),
        ({"x_train": np.zeros((5, 4, 3))}, "x_train is float64; images must be uint8 or float32"),
        ({"x_train": np.zeros((5, 12), np.uint8)}, r"x_train has shape \(5, 12\); must be \(n, H"),
        ({"x_test": np.zeros((0, 4, 3), np.uint8)}, r"x_test has shape \(0, 4, 3\)"),
        (
            {"x_train": np.full((5, 4, 3), np.nan, np.float32)},
            "x_train has values that are not finite",
        ),
        (
            {"x_test": np.zeros((2, 3, 4), np.uint8)},
            r"one shape and dtype, .*\(4, 3, 1\) uint8.*\(3, 4, 1\) uint8",
        ),
        ({"x_test": np.zeros((2, 4, 3), np.float32)}, "one shape and dtype, .*float32"),
        ({"y_train": np.zeros(4, int)}, "x_train has 5 images, y_train 4 labels"),
        ({"y_test": np.zeros(3, int)}, "x_test has 2 images, y_test 3 labels"),
        ({"y_train": np.zeros(5)}, "y_train is float64; labels must be whole numbers"),
        (
            {"y_test": np.zeros((2, 3), int)},
            r"y_train and y_test must have as many labels a sample, not .*\(\).*\(3,\)",
        ),
        ({"y_test": np.zeros((2, 0), int)}, r"y_test has shape \(2, 0\); labels must be \(n,\) or"),
        (
            {"y_train": np.array([0, -1, 2, 0, 0])},
            "y_train has labels from -1 to 2; they must be 0 to 2",
        ),
    ],
)
def test_unfit_arrays_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"mine.npz: .*{message}"):
        read(tmp_path, **changes)


def test_labels_above_the_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="y_train has labels from 0 to 2; they must be 0 to 1"):
        read(tmp_path, classes=2)


def test_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(3))

    with pytest.raises(DataError, match=r"a.npy: must be an .npz file"):
        NumpyArchive(**section(root=path, classes=None)).read(tmp_path)
    with pytest.raises(DataError, match=r"b.npz: there is no such file"):
        NumpyArchive(**section(root=tmp_path / "b.npz", classes=None)).read(tmp_path)


def test_damaged_npz_is_named(tmp_path: Path) -> None:
    read(tmp_path)
    path = tmp_path / "mine.npz"
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        inside = archive.getinfo("x_train.npy").header_offset + 200
    content[inside] ^= 0xFF
    path.write_bytes(content)

    with pytest.raises(DataError, match=r"mine.npz: .*(CRC|can't be read)"):
        NumpyArchive(**section(root=path, classes=None)).read(tmp_path)


def test_more_classes_than_can_be_counted_are_refused() -> None:
    images, labels = np.zeros((2, 4, 4), np.uint8), np.array([0, 2**40])
    arrays = {"x_train": images, "x_test": images, "y_train": labels, "y_test": labels}
    with pytest.raises(ValueError, match="labels go up to 1099511627776; there can be 10,000"):
        split_arrays(arrays, None)


def test_root_is_required() -> None:
    with pytest.raises(
        ValidationError, match=r"missing; it must be an .npz file with x_train, y_t"
    ):
        NumpyArchive(**section(root=None, classes=None))
