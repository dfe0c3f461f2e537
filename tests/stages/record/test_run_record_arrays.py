"""Logs as arrays, those of strangers among them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.stages.record.run_record import MAX_NAMES, read_arrays


def test_log_is_read_into_an_array_per_name(tmp_path: Path) -> None:
    log = tmp_path / "evals.jsonl"
    lines = [
        {"step": 1, "loss": None, "f1": {"macro": 0.5, "per_class": {"a": 1}}},
        {"step": 2, "loss": 0.25, "accuracy": True},
        {"step": 3, "loss": "<b>", "f1": 10**400},
    ]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 4')
    nan = np.nan
    arrays = read_arrays(log)
    assert list(arrays) == ["step", "loss", "f1", "accuracy"]
    np.testing.assert_array_equal(arrays["step"], [1, 2, 3])
    np.testing.assert_array_equal(arrays["loss"], [nan, 0.25, nan])
    np.testing.assert_array_equal(arrays["f1"], [0.5, nan, nan])
    np.testing.assert_array_equal(arrays["accuracy"], [nan, 1, nan])


def test_missing_log_has_no_arrays(tmp_path: Path) -> None:
    assert read_arrays(tmp_path / "metrics.jsonl") == {}


def test_log_with_too_many_names_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(f'{{"step": {n}, "key {n}": 1}}\n' for n in range(MAX_NAMES + 5)))
    with pytest.raises(DataError, match="line 1000: the log must have at most 1,000 names"):
        read_arrays(log)
