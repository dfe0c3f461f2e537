"""Telemetry for tests, of the numbers that decide something."""

from __future__ import annotations

import numpy as np

from pipeline.training.telemetry import Telemetry

NAMES = ("loss", "learning_rate", "grad_norm", "loss_scale", "skipped")


def telemetry_of(start: int, rows: np.ndarray) -> Telemetry:
    """Make telemetry of steps after `start` from rows of NAMES."""
    return Telemetry.from_rows(start, rows, NAMES, {"skipped"})
