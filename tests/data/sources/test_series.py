"""The source `series`: splits, classes and numbers, statistics of the training split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.sources.series import LabelledSeries
from tests.data.section import section

HEADER = "@classLabel true a b\n@data\n"
TRAIN = HEADER + "1,2,3:a\n3,2,1:b\n5,6,7:a\n"
TEST = HEADER + "10,20,30:b\n"


def source(root: Path, **fields: Any) -> LabelledSeries:
    return LabelledSeries(**section(root=root, **fields))


def read(root: Path, **fields: Any) -> RawData:
    return source(root, **fields).read(Path())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A set as the archives ship them."""
    (tmp_path / "Set").mkdir()
    (tmp_path / "Set" / "Set_TRAIN.ts").write_text(TRAIN)
    (tmp_path / "Set" / "Set_TEST.ts").write_text(TEST)
    return tmp_path / "Set"


def save_npz(path: Path, label: np.ndarray) -> Path:
    np.savez(path, series=np.arange(2.0 * len(label)).reshape(-1, 2), label=label)
    return path


def test_test_file_is_beside_the_training_file(folder: Path) -> None:
    for root in (folder, folder / "Set_TRAIN.ts"):
        raw = read(root)
        assert raw.train.specs()["series"].shape == (3, 1)
        assert raw.train.columns["series"].dtype == np.float32
        assert np.asarray(raw.train.columns["label"]).tolist() == [0, 1, 0]
        assert np.asarray(raw.eval.columns["series"]).ravel().tolist() == [10, 20, 30]
        assert raw.classes == ("a", "b")


def test_statistics_are_of_the_training_split_alone(folder: Path) -> None:
    scale = read(folder).scale
    assert scale is not None
    train = np.array([1, 2, 3, 3, 2, 1, 5, 6, 7])
    assert (scale.mean, scale.std) == ((train.mean(),), (train.std(),))
    assert read(folder, standardise=False).scale is None


def test_split_has_its_share_of_each_class(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "a.npz", np.array([0, 1] * 10))
    raw = read(path, split=0.2)
    assert np.bincount(np.asarray(raw.eval.columns["label"])).tolist() == [2, 2]
    rows = np.asarray(raw.train.columns["series"]).reshape(-1, 2)
    assert raw.scale is not None
    assert raw.scale.mean == (rows.astype(np.float64).mean(),)


def test_padding_is_the_mean_of_the_channel(tmp_path: Path) -> None:
    (tmp_path / "a_TRAIN.ts").write_text(HEADER + "1,2,3,9:a\n2:b\n")
    (tmp_path / "a_TEST.ts").write_text(HEADER + "4,4:b\n")
    raw = read(tmp_path / "a_TRAIN.ts", length=3)
    assert np.asarray(raw.train.columns["series"])[..., 0].tolist() == [[1, 2, 3], [2, 2, 2]]
    assert np.asarray(raw.eval.columns["series"])[..., 0].tolist() == [[4, 4, 2]]
    expected = "series of 1 to 4 steps in the training file: 1 cut and 1 padded to 3"
    assert raw.notes == (expected,)
    with pytest.raises(DataError, match=r"series must be equally long, or set dataset.length"):
        read(tmp_path / "a_TRAIN.ts")


def test_numbers_are_standardised_by_the_training_split(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "a.npz", np.linspace(0, 1, 10))
    raw = read(path, task="regression")
    train = np.asarray(raw.train.columns["label"])
    assert train.shape == (8, 1)
    np.testing.assert_allclose([train.mean(), train.std()], [0, 1], atol=1e-6)
    assert raw.targets.names == ("label",)


def test_second_file_is_evaluated(tmp_path: Path) -> None:
    first = save_npz(tmp_path / "a.npz", np.array([0, 1, 1]))
    second = save_npz(tmp_path / "b.npz", np.array([1]))
    assert len(read(first, eval_path=second).eval) == 1
    with pytest.raises(DataError, match=r"eval_path = .*a.npz: must be another file than"):
        read(first, eval_path=first)
    third = save_npz(tmp_path / "c.npz", np.array([2]))
    with pytest.raises(DataError, match=r"c.npz: series 0: has class 2, which no training series"):
        read(first, eval_path=third)


def test_wrong_settings_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"buckets: must be null; dataset.length is the size"):
        source(folder, buckets=((3,),))
    (folder / "Set_TEST.ts").unlink()
    with pytest.raises(DataError, match=r"Set_TRAIN.ts: lacks Set_TEST.ts beside it; or name"):
        read(folder)
    path = save_npz(tmp_path / "a.npz", np.array([1, 1]))
    with pytest.raises(DataError, match="all series have one class; must have at least two"):
        read(path)
    path = save_npz(tmp_path / "b.npz", np.array([0, 1]))
    with pytest.raises(DataError, match="leaves 2 for training and 0 for evaluation"):
        read(path)
