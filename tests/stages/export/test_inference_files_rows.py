"""Predictions as rows of a CSV file."""

from __future__ import annotations

import numpy as np

from pipeline.data.columns import Targets
from pipeline.stages.export.inference_files import make_prediction_row


def test_target_named_file_is_prefixed() -> None:
    numbers = Targets(("file", "size"), "regression", (10.0, 0.0), (2.0, 1.0))
    row = make_prediction_row("a.png", np.array([1.0, 3.0]), numbers, top=1)
    assert row == {"file": "a.png", "predicted_file": 12.0, "size": 3.0}
    labels = make_prediction_row("a.png", np.zeros(2), Targets(("file", "b"), "multi_label"), top=1)
    assert labels == {"file": "a.png", "predicted_file": "0.500000", "b": "0.500000"}
