"""Predictions as rows of a CSV file, one for each sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.data.targets import Targets


def prediction_row(name: str, outputs: np.ndarray, targets: Targets, top: int) -> dict[str, Any]:
    """The columns of one sample, whose outputs are float64 (K,).

    file, class, probability, and with `top` above 1 class_2, probability_2 and so on; the numbers
    of a regression, in the units of the data, or the probability of each label, by name; a target
    that is called file is predicted_file.
    """
    match targets.task:
        case "regression":
            numbers = targets.in_units(outputs).tolist()
            return {"file": name, **dict(zip(_columns(targets), numbers, strict=True))}
        case "multi_label":
            shares = (f"{share:.6f}" for share in 0.5 * (1 + np.tanh(outputs / 2)))
            return {"file": name, **dict(zip(_columns(targets), shares, strict=True))}
    powers = np.exp(outputs - outputs.max())
    probabilities = powers / powers.sum()
    row: dict[str, Any] = {"file": name}
    for rank, best in enumerate(np.argsort(-probabilities, kind="stable")[:top], start=1):
        suffix = "" if rank == 1 else f"_{rank}"
        row[f"class{suffix}"] = targets.names[best]
        row[f"probability{suffix}"] = f"{probabilities[best]:.6f}"
    return row


def _columns(targets: Targets) -> list[str]:
    return ["predicted_file" if name == "file" else name for name in targets.names]
