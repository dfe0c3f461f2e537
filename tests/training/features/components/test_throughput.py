"""Labels per second and utilisation from steps of a known time."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.training.features.components.throughput import Throughput, measure_peak
from pipeline.training.telemetry import Telemetry
from tests.training.test_step import RATES, make_batch, make_config, make_step, start


def test_rates_are_of_all_steps_of_a_dispatch() -> None:
    telemetry = Telemetry(0, {"labels": np.array([32.0, 16.0], np.float32)})
    measured = Throughput(3e9, 1.5).measure(telemetry, 0.5)
    assert measured["labels_per_s"].tolist() == [96.0, 96.0]
    assert measured["model_flops_utilisation"] == pytest.approx([0.008, 0.008])


@pytest.mark.slow
def test_step_counts_its_valid_labels() -> None:
    step = make_step(features=(*make_config().features, Throughput(1.0, 1.0)))
    _, record = step.step(start(step), make_batch(count=np.int32(3)), RATES)
    assert record.extras == (3.0,)
    assert step.columns[-1] == "labels"


@pytest.mark.slow
def test_peak_is_that_of_a_processor() -> None:
    assert 1e9 < measure_peak() < 1e16
