"""Predictions as rows of a CSV file, arrays of samples, and names of masks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli.runs.infer import InferArguments, _format_prediction
from pipeline.core.errors import DataError
from pipeline.data.columns import ColumnSpec, Targets
from pipeline.stages.export.inference_files import (
    count_samples,
    make_prediction_row,
    read_samples,
    require_new_names,
)
from pipeline.stages.record.trained_run import Samples


def test_target_named_file_is_prefixed() -> None:
    numbers = Targets(("file", "size"), "regression", (10.0, 0.0), (2.0, 1.0))
    row = make_prediction_row("a.png", np.array([1.0, 3.0]), numbers, top=1)
    assert row == {"file": "a.png", "predicted_file": 12.0, "size": 3.0}
    labels = make_prediction_row("a.png", np.zeros(2), Targets(("file", "b"), "multi_label"), top=1)
    assert labels == {"file": "a.png", "predicted_file": "0.500000", "b": "0.500000"}
    both = Targets(("file", "predicted_file"), "regression", (0.0, 0.0), (1.0, 1.0))
    row = make_prediction_row("a.png", np.array([1.0, 2.0]), both, top=1)
    assert row == {"file": "a.png", "predicted_predicted_file": 1.0, "predicted_file": 2.0}
    arguments = InferArguments((), (), (), True, None, None, None)
    assert json.loads(_format_prediction(arguments, "a.png", np.array([1.0, 2.0]), both)) == row


@pytest.mark.parametrize(
    ("shape", "given", "count"),
    [
        ((1, 1, 1), (5, 1, 1, 1), 5),
        ((1, 1, 1), (5, 1, 1), 5),
        ((1, 1, 1), (1, 1), 1),
        ((4, 3, 1), (4, 3), 1),
        ((4, 3, 1), (2, 4, 3, 1), 2),
        ((), (7,), 7),
        ((), (), 1),
    ],
)
def test_array_has_one_sample_or_several(
    shape: tuple[int, ...], given: tuple[int, ...], count: int, tmp_path: Path
) -> None:
    samples = Samples({"x": ColumnSpec(shape, "float32")}, Targets(("a", "b")))
    np.save(tmp_path / "x.npy", np.zeros(given, np.float32))
    arrays = read_samples(tmp_path / "x.npy", samples)
    assert count_samples(arrays) == count
    assert np.shape(arrays) == (count, *shape)
    np.save(tmp_path / "x.npy", np.zeros((3, 3, *given), np.float32))
    with pytest.raises(DataError, match=r"it has shape .*; must be \(.*\) or \(n"):
        read_samples(tmp_path / "x.npy", samples)


def test_masks_of_an_array_do_not_replace_other_masks(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.npy", "b_0.png", "a_10_0.png")]
    require_new_names(tmp_path / "masks", files)
    require_new_names(tmp_path / "masks", [*files, tmp_path / "a_010.png"])
    with pytest.raises(DataError, match=r"a_10.png: its mask and the one of image 10 of .*a.npy"):
        require_new_names(tmp_path / "masks", [*files, tmp_path / "a_10.png"])
