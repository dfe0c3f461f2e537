"""The formulas of CANN's accuracy comparison, element by element in Python: an oracle for numpy's.

As in CANN 8.1, `tools/operator_cmp/compare/algorithm_manager/builtin_algorithm`; sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 2.0**-23


def cosine(x: Sequence[float], y: Sequence[float]) -> float:
    x_norm = math.sqrt(math.fsum(a * a for a in x))
    y_norm = math.sqrt(math.fsum(b * b for b in y))
    if len(x) == 1 or (x_norm == 0 and y_norm == 0):
        return 1.0
    if x_norm == 0 or y_norm == 0:
        return math.nan
    return min(1.0, math.fsum(a * b for a, b in zip(x, y, strict=True)) / (x_norm * y_norm))


def max_absolute(x: Sequence[float], y: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(x, y, strict=True))


def accumulated_relative(x: Sequence[float], y: Sequence[float]) -> float:
    pairs = zip(x, y, strict=True)
    return math.fsum(abs(a / b - 1) for a, b in pairs if abs(b) > EPSILON)


def relative_euclidean(x: Sequence[float], y: Sequence[float]) -> float:
    below = math.sqrt(math.fsum(b * b for b in y))
    above = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(x, y, strict=True)))
    return above / below if below else 0.0


def divergence(x: Sequence[float], y: Sequence[float]) -> float:
    if not any(x) and not any(y):
        return 0.0
    if not any(x) or not any(y):
        return math.nan
    p, q = _shares(x), _shares(y)
    total = math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
    return 0.0 if abs(total) < EPSILON else total


def _shares(x: Sequence[float]) -> list[float]:
    low, high = min(x), max(x)
    scaled = [(a - low) / (high - low) if high > low else 1.0 for a in x]
    raised = [max(a, EPSILON) for a in scaled]
    total = math.fsum(raised)
    return [a / total for a in raised]


def mean_and_deviation(x: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(x) / len(x)
    return mean, math.sqrt(math.fsum((a - mean) ** 2 for a in x) / len(x))
