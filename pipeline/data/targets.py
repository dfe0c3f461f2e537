"""Targets of a network: classes, numbers, labels or the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Task = Literal["classification", "regression", "multi_label", "next_token"]


@dataclass(frozen=True)
class Targets:
    """The meaning of a network's outputs.

    classification: classes; regression: numbers; multi_label: labels, any number of which a sample
    may have; next_token: the tokens of a vocabulary. Numbers are standardised by the training
    split: `(number - mean) / std`. Metrics and predictions are in the units of the data.
    """

    names: tuple[str, ...]
    """Names of the classes, numbers, labels or tokens, in the order of outputs."""
    task: Task = "classification"
    mean: tuple[float, ...] = ()
    """Mean of each number, in the units of the data; empty for other tasks."""
    std: tuple[float, ...] = ()
    """Standard deviation of each number, likewise."""
    counts: tuple[int, ...] = ()
    """Number of training labels of each class; empty unless the loss depends on them."""

    def to_dict(self) -> dict[str, Any]:
        """Return task, mean and standard deviation as JSON."""
        return {"task": self.task, "mean": list(self.mean), "std": list(self.std)}

    def to_data_units(self, outputs: np.ndarray) -> np.ndarray:
        """Return outputs (..., K) in the units of the data; only regression changes them."""
        if self.task != "regression":
            return outputs
        return outputs * np.asarray(self.std) + np.asarray(self.mean)

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        count = len(self.names)
        match self.task:
            case "classification":
                return f"{count} classes"
            case "multi_label":
                return f"{count} labels"
            case "next_token":
                return f"{count:,} different tokens"
        named = ", ".join(
            f"{name} {mean:.4g} +- {std:.4g}"
            for name, mean, std in zip(self.names[:4], self.mean, self.std, strict=False)
        )
        return f"{count} number{'s' if count > 1 else ''} ({named}{', ...' if count > 4 else ''})"


def standardise_targets(
    train: np.ndarray, evaluated: np.ndarray, names: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray, Targets]:
    """Return the numbers of both splits, (n, K), standardised by the training split, float32, and
    their targets. Raises ValueError for numbers that aren't finite, and if a column is constant."""
    for split, values in (("training", train), ("evaluation", evaluated)):
        if not np.isfinite(values).all():
            column = names[int(np.flatnonzero(~np.isfinite(values).all(axis=0))[0])]
            raise ValueError(f"{column} has values in the {split} split that are not finite")
    mean = np.asarray(train, np.float64).mean(axis=0)
    std = np.asarray(train, np.float64).std(axis=0)
    constant = [name for name, value in zip(names, std, strict=True) if value == 0]
    if constant:
        raise ValueError(f"{', '.join(constant)} is the same in all training samples")
    train, evaluated = (
        ((np.asarray(values, np.float64) - mean) / std).astype(np.float32)
        for values in (train, evaluated)
    )
    targets = Targets(names, "regression", tuple(mean.tolist()), tuple(std.tolist()))
    return train, evaluated, targets
