"""The table of series: what it is made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.public.ucr import PUBLISHED, list_rows, read_accuracies


def test_row_has_the_mean_the_range_and_published_values(tmp_path: Path) -> None:
    file = tmp_path / "sweep.csv"
    file.write_text("job,status,metrics.accuracy\n0,done,0.5\n1,done,0.7\n")
    assert list(list_rows({"GunPoint": read_accuracies(file)})) == [
        ["GunPoint", "0.600 ± 0.100", "0.500 to 0.700", *PUBLISHED["GunPoint"]]
    ]


def test_job_that_is_not_done_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sweep.csv"
    file.write_text("job,status,metrics.accuracy\n0,done,0.5\n1,failed,\n")
    with pytest.raises(ValueError, match="jobs 1 aren't done"):
        read_accuracies(file)
