"""Targets of a network: classes, numbers, labels or the next token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pipeline.core.registry import MAX_FLOAT

Distribution = Literal["", "poisson", "gamma", "squared_log", "tails"]
"""Distribution of a number that a loss is for; empty: any."""
POSITIVE = ("poisson", "gamma", "squared_log")
"""Distributions of numbers of at least 0."""
Task = Literal["classification", "regression", "multi_label", "next_token", "matching", "sequence"]


@dataclass(frozen=True)
class Targets:
    """The meaning of a network's outputs.

    classification: classes; regression: numbers; multi_label: labels, of which a sample may have
    several or none; next_token: the tokens of a vocabulary; matching: both embeddings of a pair,
    whose label is its number in the split, without names; sequence: symbols, which aren't aligned
    with the outputs at positions, of which the first is the blank. A network is trained on numbers
    that are standardised by the training split, `(number - mean) / std`. Metrics and predictions
    are in the units of the data.
    """

    names: tuple[str, ...]
    """Names of the classes, numbers, labels or tokens, in the order of outputs."""
    task: Task = "classification"
    mean: tuple[float, ...] = ()
    """Mean of each number, in the units of the data; empty for other tasks."""
    std: tuple[float, ...] = ()
    """Standard deviation of each number, in the units of the data; empty for other tasks."""
    counts: tuple[int, ...] = ()
    """Number of training labels of each class; empty unless the loss depends on them."""
    naive_mae: float | None = None
    """Mean absolute error of a naive forecast of the evaluation samples, in the data's units."""

    distribution: Distribution = ""
    """Distribution of the numbers, if the loss depends on it."""

    @property
    def is_positive(self) -> bool:
        """Whether the numbers are at least 0, with a mean above 0, so that a network may predict
        them by an exponential."""
        return self.distribution in POSITIVE

    def with_distribution(self, distribution: Distribution) -> Targets:
        """Return the targets with another distribution."""
        return replace(self, distribution=distribution)

    def to_dict(self) -> dict[str, Any]:
        """Return task, mean, standard deviation and a known distribution as JSON values."""
        known = {"distribution": self.distribution} if self.distribution else {}
        return {"task": self.task, "mean": list(self.mean), "std": list(self.std), **known}

    def to_data_units(self, outputs: np.ndarray) -> np.ndarray:
        """Return outputs (..., K) in the units of the data. Only regression changes them."""
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
            case "matching":
                return "pairs to match"
            case "sequence":
                return f"sequences of {count - 1} symbols"
            case "next_token":
                return f"{count:,} different tokens"
        first_numbers = ", ".join(
            f"{name} {mean:.4g} +- {std:.4g}"
            for name, mean, std in zip(self.names[:4], self.mean, self.std, strict=False)
        )
        plural = "s" if count > 1 else ""
        more = ", ..." if count > 4 else ""
        return f"{count} number{plural} ({first_numbers}{more})"


def require_trained_range(train: np.ndarray, evaluated: np.ndarray) -> None:
    """Raise ValueError if a label of the evaluation split is above all of the training split, which
    define the classes. Both are int (n,), not empty."""
    last = int(train.max())
    highest = int(evaluated.max())
    if highest > last:
        raise ValueError(
            f"the evaluation split has the label {highest}, and the training split has labels from "
            f"{int(train.min())} to {last}; a class without training samples can't be learned; "
            "correct the labels, or set dataset.classes to evaluate it all the same"
        )


def make_number_targets(
    train: np.ndarray, evaluated: np.ndarray, names: tuple[str, ...], task: Task
) -> tuple[np.ndarray, np.ndarray, Targets]:
    """Return the numbers of both splits, (n, K), as float32, and their targets. For a regression
    they are standardised by the training split. Raises ValueError for numbers that aren't finite in
    float32, also once they are standardised, and if all training numbers of a column are equal."""
    if task != "regression":
        return train.astype(np.float32), evaluated.astype(np.float32), Targets(names, task)
    for split_name, values in (("training", train), ("evaluation", evaluated)):
        is_finite = (np.abs(values) <= MAX_FLOAT).all(axis=0)
        if not is_finite.all():
            column = names[int(np.flatnonzero(~is_finite)[0])]
            raise ValueError(
                f"{column} has values in the {split_name} split that are not finite in float32"
            )
    mean = np.asarray(train, np.float64).mean(axis=0)
    std = np.asarray(train, np.float64).std(axis=0)
    # The computed deviation of equal numbers such as 0.1 isn't always 0.
    is_constant = (std == 0) | (train == train[:1]).all(axis=0)
    constant = [name for name, is_equal in zip(names, is_constant, strict=True) if is_equal]
    if constant:
        raise ValueError(f"{', '.join(constant)} is the same in all training samples")

    def standardise(values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return ((np.asarray(values, np.float64) - mean) / std).astype(np.float32)

    targets = Targets(names, "regression", tuple(mean.tolist()), tuple(std.tolist()))
    scaled = standardise(evaluated)
    overflows = ~np.isfinite(scaled).all(axis=0)
    if overflows.any():
        column = names[int(np.flatnonzero(overflows)[0])]
        spread = "the standard deviation of the training split"
        raise ValueError(
            f"{column} has values in the evaluation split that overflow, divided by {spread}"
        )
    return standardise(train), scaled, targets
