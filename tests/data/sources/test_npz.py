from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.padding.buckets import RaggedColumn
from pipeline.data.sources.npz import NumpyArchive, make_class_data
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


def test_float_color_images_are_unchanged(tmp_path: Path) -> None:
    images = np.linspace(-1, 1, 5 * 4 * 3 * 2, dtype=np.float32).reshape(5, 4, 3, 2)

    data = read(tmp_path, x_train=images, x_test=images[:2])

    assert data.train.columns["image"].dtype == np.float32
    np.testing.assert_array_equal(data.train.columns["image"][:], images)


@pytest.mark.parametrize(
    ("dtype", "column"), [(np.float32, "features"), (np.int32, "tokens"), (np.uint8, "tokens")]
)
def test_rows_are_unchanged(tmp_path: Path, dtype: Any, column: str) -> None:
    """Rows have no axis of size 1; whole numbers are tokens."""
    rows = np.arange(60).reshape(5, 12).astype(dtype)

    data = read(tmp_path, x_train=rows, x_test=rows[:2])

    assert data.inputs == (column,)
    assert set(data.train.columns) == {column, "label"}
    assert data.train.columns[column].dtype == dtype
    np.testing.assert_array_equal(data.train.columns[column][:], rows)
    np.testing.assert_array_equal(data.eval.columns[column][:], rows[:2])


def test_labels_of_column_shape_are_accepted(tmp_path: Path) -> None:
    data = read(tmp_path, y_train=np.array([[0], [2], [1], [0], [2]], np.uint8))

    assert data.train.columns["label"][:].tolist() == [0, 2, 1, 0, 2]


def test_label_per_position_is_accepted(tmp_path: Path) -> None:
    masks = np.arange(5 * 4 * 3).reshape(5, 4, 3) % 7

    data = read(tmp_path, y_train=masks, y_test=masks[:2])

    np.testing.assert_array_equal(data.train.columns["label"][:], masks)
    assert data.train.columns["label"].dtype == np.int32
    assert len(data.classes) == 7


def test_float_labels_are_standardised_by_the_training_split(tmp_path: Path) -> None:
    y_train = np.array([[1.0, 10], [2, 20], [3, 30], [4, 40], [5, 50]])

    data = read(tmp_path, y_train=y_train, y_test=np.array([[3.0, 80], [1, 30]]))

    assert (data.targets.task, data.targets.names) == ("regression", ("y0", "y1"))
    assert (data.targets.mean, data.targets.std) == ((3, 30), (2**0.5, 200**0.5))
    expected = np.array([[0, 50 / 200**0.5], [-(2**0.5), 0]], np.float32)
    np.testing.assert_array_equal(data.eval.columns["label"][:], expected)
    np.testing.assert_allclose(data.targets.to_data_units(data.train.columns["label"][:]), y_train)


def test_multi_label_values_must_be_0_or_1(tmp_path: Path) -> None:
    flags = np.array([[1, 0], [0, 0], [1, 1], [0, 1], [0, 0]], np.uint8)
    np.savez(tmp_path / "mine.npz", **arrays(y_train=flags, y_test=flags[:2]))
    spec = section(root=tmp_path / "mine.npz", classes=None, task="multi_label")

    data = NumpyArchive(**spec).read(tmp_path)

    assert data.targets.task == "multi_label"
    np.testing.assert_array_equal(data.train.columns["label"][:], flags.astype(np.float32))
    np.savez(tmp_path / "mine.npz", **arrays(y_train=2 * flags, y_test=flags[:2]))
    with pytest.raises(DataError, match="y_train has values other than 0 and 1, which multi_label"):
        NumpyArchive(**spec).read(tmp_path)
    with pytest.raises(ValidationError, match="next_token"):
        NumpyArchive(**{**spec, "task": "next_token"})


def test_classes_may_exceed_the_labels(tmp_path: Path) -> None:
    assert len(read(tmp_path, classes=7).classes) == 7
    assert len(read(tmp_path, classes=13, y_test=np.full(2, 12)).classes) == 13


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None, "x_test": None}, "lacks x_test, y_test; it has x_train, y_train"),
        ({"x_test": np.array([{}, []], object)}, "x_test can't be read: x_test holds objects"),
        ({"x_train": np.zeros((5, 4, 3))}, "x_train is float64; must be uint8, int32 or float32"),
        ({"x_train": np.zeros(5, np.uint8)}, r"x_train has shape \(5,\); must be \(n, H, W\)"),
        (
            {"x_train": np.zeros((5, 12), np.uint8)},
            r"one shape and dtype, .*\(12,\) uint8.*4, 3, 1",
        ),
        (
            {"x_test": np.zeros((0, 4, 3), np.uint8)},
            "x_test has no samples; must have at least one",
        ),
        (
            {"x_train": np.full((5, 4, 3), np.nan, np.float32)},
            "x_train has values that are not finite",
        ),
        (
            {"x_test": np.zeros((2, 3, 4), np.uint8)},
            r"one shape and dtype, .*\(4, 3, 1\) uint8.*\(3, 4, 1\) uint8",
        ),
        ({"x_test": np.zeros((2, 4, 3), np.float32)}, "one shape and dtype, .*float32"),
        ({"y_train": np.zeros(4, int)}, "x_train has 5 samples, y_train 4 labels"),
        ({"y_test": np.zeros(3, int)}, "x_test has 2 samples, y_test 3 labels"),
        ({"y_train": np.zeros(5)}, "y is the same in all training samples"),
        ({"y_test": np.array([0.5, np.nan])}, "y has values in the evaluation split that are not"),
        (
            {"y_train": np.zeros((5, 2)), "y_test": np.zeros((2, 3))},
            "the same number of columns, not .*2.*3",
        ),
        (
            {"y_test": np.zeros((2, 3), int)},
            r"y_train and y_test must have the same number of labels per sample, .*\(\).*\(3,\)",
        ),
        ({"y_test": np.zeros((2, 0), int)}, r"y_test has shape \(2, 0\); labels must be \(n,\) or"),
        (
            {"y_train": np.array([0, -1, 2, 0, 0])},
            "y_train has labels from -1 to 2; they must be 0 to 2",
        ),
        (
            {"y_train": np.full(5, -1), "y_test": np.full(2, -2)},
            "has labels from -2 to -1; must have labels from 0 on$",
        ),
        (
            {"y_test": np.full(2, 12)},
            "the evaluation split has the label 12, and the training split has labels from 0 to 2; "
            "a class without training samples can't be learned; correct the labels, or set "
            "dataset.classes to evaluate it all the same$",
        ),
    ],
)
def test_unfit_arrays_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"mine.npz: .*{message}"):
        read(tmp_path, **changes)


def test_labels_above_the_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="y_train has labels from 0 to 2; they must be 0 to 1"):
        read(tmp_path, classes=2)


def test_non_npz_file_is_refused(tmp_path: Path) -> None:
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


def arrays_of(labels: np.ndarray, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Both splits with these labels, one a sample."""
    images = np.zeros((len(labels), 4, 4), np.uint8)
    arrays = {"x_train": images, "x_test": images, "y_train": labels, "y_test": labels}
    return {**arrays, **more}


def test_implausibly_large_class_labels_are_refused() -> None:
    """A price or a time; who means that many classes says how many."""
    for label in (10_000, 2**40):
        expected = f"labels go up to {label}; set dataset.classes if there are more than 10,000"
        with pytest.raises(ValueError, match=expected):
            make_class_data(arrays_of(np.array([0, label])), None)
    assert len(make_class_data(arrays_of(np.array([0, 9_999])), None).classes) == 10_000
    assert len(make_class_data(arrays_of(np.array([0, 50_256])), 50_257).classes) == 50_257


def test_number_of_classes_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1048576"):
        NumpyArchive(**section(root=tmp_path / "a.npz", classes=2**40))


def test_ignored_label_is_not_a_class() -> None:
    for ignored in (-100, 255):
        data = make_class_data(arrays_of(np.array([0, ignored, 2])), None, ignored)
        assert data.classes == ("0", "1", "2")
        assert data.train.columns["label"][:].tolist() == [0, ignored, 2]
    with pytest.raises(ValueError, match=r"y_train has labels from -1 to 1; .* 0 to 1, or -100"):
        make_class_data(arrays_of(np.array([0, 1, -1])), None, -100)
    with pytest.raises(ValueError, match="y_train has only the label -1, which is ignored"):
        make_class_data(arrays_of(np.array([-1, -1])), 3, -1)


def test_ragged_labels_are_stored_contiguously() -> None:
    values, sizes = np.arange(7), np.array([[3], [4]])
    ragged = {f"y_{split}_sizes": sizes for split in ("train", "test")}
    arrays = arrays_of(np.zeros(2, int), **ragged, y_train=values, y_test=values)
    labels = make_class_data(arrays, None).train.columns["label"]
    assert isinstance(labels, RaggedColumn)
    assert labels.value(1).tolist() == [3, 4, 5, 6]
    assert labels.dtype == np.int32
    with pytest.raises(ValueError, match=r"y_train: values have shape \(7,\); the sizes ask for"):
        make_class_data({**arrays, "y_train_sizes": sizes + 1}, None)
    with pytest.raises(ValueError, match=r"y_test_sizes has shape \(2, 3\); must be \(n, 1\)"):
        make_class_data({**arrays, "y_test_sizes": np.ones((2, 3), int)}, None)
    with pytest.raises(ValueError, match=r"x_test_sizes has shape \(0, 3\); must be \(n, 1\)"):
        make_class_data({**arrays, "x_test_sizes": np.ones((0, 3), int)}, None)
    plain = {**arrays, "y_test": np.zeros(2, int)}
    del plain["y_test_sizes"]
    with pytest.raises(
        ValueError, match=r"must have the same number of labels per sample, not .*any"
    ):
        make_class_data(plain, None)


def test_root_is_required() -> None:
    with pytest.raises(
        ValidationError, match=r"missing; it must be an .npz file with x_train, y_t"
    ):
        NumpyArchive(**section(root=None, classes=None))


def test_further_columns_are_read_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    ages = np.arange(7.0)
    np.savez(path, **arrays(), age_train=ages[:5], age_test=ages[5:])
    spec = NumpyArchive(**section(root=path, classes=None), columns=("age",))
    data = spec.read(tmp_path)
    assert set(data.train.columns) == {"image", "label", "age"}
    np.testing.assert_array_equal(data.train.columns["age"][:], ages[:5])
    np.testing.assert_array_equal(data.eval.columns["age"][:], ages[5:])
    assert data.eval.columns["age"].dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"age_train": np.zeros(5)}, r"lacks age_test"),
        ({"age_train": np.zeros(4), "age_test": np.zeros(2)}, r"age_train has shape \(4,\)"),
        ({"age_train": np.array(list("abcde")), "age_test": np.zeros(2)}, "must be numbers"),
        ({"age_train": np.full(5, np.nan), "age_test": np.zeros(2)}, "not finite"),
        ({"age_train": np.full(5, 1e300), "age_test": np.zeros(2)}, "not finite in float32"),
    ],
)
def test_wrong_column_is_named(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, **arrays(), **changes)
    with pytest.raises(DataError, match=problem):
        NumpyArchive(**section(root=path, classes=None), columns=("age",)).read(tmp_path)


@pytest.mark.parametrize("columns", [("label",), ("x",), ("tokens",), ("a", "a")])
def test_names_of_columns_are_checked(tmp_path: Path, columns: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="columns"):
        NumpyArchive(**section(root=tmp_path, classes=None), columns=columns)
