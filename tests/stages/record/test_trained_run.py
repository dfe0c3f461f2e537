from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.data.columns import ColumnSpec
from pipeline.stages.record.trained_run import parse_samples

OLDER = {
    "image": {"shape": [8, 8, 1], "dtype": "uint8", "layout": "hwc"},
    "classes": ["no", "yes"],
    "targets": {"task": "classification", "mean": [], "std": []},
}
"""Samples as runs and exports described them without names of columns."""


def test_images_of_older_runs_are_read() -> None:
    samples = parse_samples(OLDER, Path())
    assert samples.columns == {"image": ColumnSpec((8, 8, 1), "uint8")}
    assert samples.classes == ("no", "yes")


@pytest.mark.parametrize("kind", ["text", "table"])
def test_other_samples_of_older_runs_are_refused(kind: str) -> None:
    with pytest.raises(DataError, match=f"beside its {kind}: .* older version; train it again"):
        parse_samples({**OLDER, kind: {}}, Path())
