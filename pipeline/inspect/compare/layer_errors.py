"""The error of each layer by itself, and the error that its type explains.

Both sides compute every layer from what the reference's layers read, forward and backward. Errors
are measured from the reference's layers in float64. The expected error is the error of the
reference's layers, plainly lowered, in the types of the examined side: PyTorch's `same` tests the
same: whether a result is worse than the reference's rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nan, prod, sqrt
from statistics import median

import jax.numpy as jnp
import numpy as np

from pipeline.inspect.compare.accuracy_columns import norm
from pipeline.inspect.dumps.layer_programs import LayerTensors
from pipeline.inspect.dumps.tensor_names import Role, TensorName, named_tensors

FACTOR = 2.0
FACTOR_FLOAT32 = 3.0
"""How many times its expected error makes a layer a finding: with types of 16 bits, whose roundings
both sides do at the same places, and in float32, whose sums are rounded in another order."""
PATTERN = 12.0
"""How many times the expected ratio of variances makes a finding of an error of 16 bits."""
FACTOR_WINOGRAD = 12.0
"""The same for convolutions of a side that computes some by Winograd's formulas, whose sums before
and after the products lose digits: 3.9 and 4.5 times the expected error were measured."""
FEW = 6.0
PATTERN_SIZE = 256
"""The factor grows by 1 + FEW / sqrt(n) for n elements, whose errors are a small sample; an error
has a pattern from PATTERN_SIZE elements on."""
MAX_KIND = 3.0
"""The most by which the errors of other layers of its kind excuse a layer."""
LEAST = 0.25
"""Relative error, in units of rounding, that any result may have: about half of what rounding
each element once makes."""
OUTPUT_ROLES: tuple[Role, ...] = ("output", "input_gradient", "gradient", "statistics")
"""Roles of what a layer makes."""


@dataclass(frozen=True)
class LayerError:
    """The error of one tensor that a layer makes."""

    name: TensorName
    kind: str
    dtype: str
    size: int
    error: float
    """Relative Euclidean distance from the layer in float64."""
    expected: float
    """The same that its type explains."""
    pattern: float
    """Ratio of the variance between rows to the variance within rows, by samples or by channels,
    the larger of both; about 1 for rounding."""
    expected_pattern: float
    excused: float = 1.0
    """The median ratio of the other layers of its kind."""
    has_winograd: bool = False
    """Whether it is of a convolution, some of which Winograd's formulas compute."""
    misshapen: str = ""
    """The shapes of both sides if they differ."""

    @property
    def ratio(self) -> float:
        """The error over the expected one."""
        if self.misshapen:
            return inf
        return self.error / self.expected if self.expected > 0 else (inf if self.error else 0.0)

    @property
    def score(self) -> float:
        """Above 1 the tensor is a finding."""
        if not np.isfinite(self.ratio):
            return inf
        narrow = self.dtype in ("float16", "bfloat16")
        factor = FACTOR if narrow else FACTOR_FLOAT32
        factor = FACTOR_WINOGRAD if self.has_winograd else factor
        by_size = self.ratio / self.excused / (factor * (1 + FEW / sqrt(self.size)))
        if narrow and self.size >= PATTERN_SIZE and self.ratio > 0.5:
            by_size = max(by_size, self.pattern / max(self.expected_pattern, 1.0) / PATTERN)
        return by_size

    def __str__(self) -> str:
        head = f"{self.name.layer} ({self.kind}): {self.name.tensor_index}"
        if self.misshapen:
            return f"{head} has {self.misshapen}"
        text = (
            f"{head} has an error of {self.error:.3g}, {self.ratio:,.1f} times what {self.dtype} "
            "explains"
        )
        if self.pattern > 3 * max(1.0, self.expected_pattern):
            text += f"; it is {self.pattern:,.0f} times as large between rows as within"
        return text


def layer_errors(
    examined: LayerTensors,
    expected: Sequence[LayerTensors],
    wide: LayerTensors,
    read: LayerTensors,
    *,
    has_winograd: bool = False,
) -> list[LayerError]:
    """Return the errors of everything that layers make, in the order of the layers.

    `examined` are the forced tensors of the side that is examined, `expected` those whose errors
    its types explain, of which the largest counts, `wide` those in float64, and `read` what all of
    them were forced to read. `has_winograd`: the side computes convolutions by those formulas.
    """
    arrays = [dict(_made(tensors)) for tensors in (examined, wide, *expected)]
    errors = []
    for name, true in arrays[1].items():
        array = arrays[0].get(name)
        if array is None:
            continue
        form = examined.forms.get(name.layer)
        kind, dtype = (form.kind, form.dtype) if form is not None else ("loss", "float32")
        smallest = _unit(dtype) * _norm_of_terms(name, true, read)
        references = [
            by_name[name]
            for by_name in arrays[2:]
            if name in by_name and by_name[name].shape == true.shape
        ]
        is_winograd = has_winograd and kind == "conv"
        size = int(true.size)
        error = LayerError(name, kind, dtype, size, nan, 0.0, nan, nan, has_winograd=is_winograd)
        errors.append(_measure(error, array, true, references, smallest))
    return _with_excuses(errors)


def _made(tensors: LayerTensors) -> Iterator[tuple[TensorName, np.ndarray]]:
    for name, array in named_tensors(tensors, np.zeros(0)):
        if name.role in OUTPUT_ROLES and array.size:
            yield name, array


def _measure(
    error: LayerError,
    array: np.ndarray,
    true: np.ndarray,
    references: Sequence[np.ndarray],
    smallest: float,
) -> LayerError:
    """Return `error` with its figures: the error of `array`, and the expected error from
    `references`."""
    if array.shape != true.shape:
        return replace(error, misshapen=f"shape {array.shape}, not {true.shape}")
    unit = _unit(error.dtype)
    if not np.isfinite(array).all():
        size = inf if np.isfinite(true).all() else 0.0
        return replace(error, error=size, expected=unit, pattern=1.0, expected_pattern=1.0)
    length = norm(true)
    errors = [norm(reference - true) for reference in references]
    least = max([*errors, LEAST * unit * length, smallest])
    relative = 1 / length if length > 0 else 1.0
    patterns = [pattern_of(reference - true) for reference in references]
    return replace(
        error,
        error=norm(array - true) * relative,
        expected=least * relative,
        pattern=pattern_of(array - true),
        expected_pattern=max(patterns, default=1.0),
    )


def _unit(dtype: str) -> float:
    """The largest relative error of rounding to a type."""
    return float(jnp.finfo(dtype).eps) / 2 if dtype not in ("int32", "bool") else 0.0


def _norm_of_terms(name: TensorName, true: np.ndarray, read: LayerTensors) -> float:
    """The norm of the terms of a parameter's gradient, whose roundings stay when the terms cancel.

    It is the root of the sum of the squares of all products that are added over the batch; 0 for
    other tensors.
    """
    cotangent = read.output_gradients.get(name.layer)
    inputs = read.inputs.get(name.layer)
    if name.role != "gradient" or cotangent is None or inputs is None:
        return 0.0
    if true.ndim == 1:
        return norm(cotangent)
    rows = max(1, prod(inputs.shape[:-1]))
    return norm(cotangent) * norm(inputs) * sqrt(prod(true.shape[:-2]) / rows)


def pattern_of(error: np.ndarray) -> float:
    """Ratio of the variance between rows to the variance within them, by samples or channels: the
    larger.

    It is the F ratio of a one-way analysis of variance: about 1 if errors are independent.
    """
    if error.ndim < 2 or error.size < PATTERN_SIZE:
        return 1.0
    by_sample = error.reshape(error.shape[0], -1)
    by_channel = error.reshape(-1, error.shape[-1]).T
    return max(_variance_ratio(by_sample), _variance_ratio(by_channel))


def _variance_ratio(rows: np.ndarray) -> float:
    count, size = rows.shape
    if count < 2 or size < 2:
        return 1.0
    means = rows.mean(axis=1)
    between = size * float(np.square(means - means.mean()).sum()) / (count - 1)
    within = float(np.square(rows - means[:, None]).sum()) / (count * (size - 1))
    return between / within if within > 0 else 1.0


def _with_excuses(errors: Sequence[LayerError]) -> list[LayerError]:
    """Divide by the median ratio of other layers of a kind, if there are three at least.

    A lowering that adds in another order makes more error in all layers that it computes.
    """
    by_kind: dict[tuple[str, str, str], list[LayerError]] = {}
    for error in errors:
        by_kind.setdefault(_kind_of(error), []).append(error)
    result = []
    for error in errors:
        ratios = [other.ratio for other in by_kind[_kind_of(error)] if other is not error]
        if len(ratios) >= 3 and np.isfinite(median(ratios)):
            error = replace(error, excused=min(max(1.0, median(ratios)), MAX_KIND))
        result.append(error)
    return result


def _kind_of(error: LayerError) -> tuple[str, str, str]:
    return error.kind, error.dtype, error.name.role


def findings(errors: Sequence[LayerError]) -> list[LayerError]:
    """Return the worst error of each layer with more error than its type explains, sorted."""
    blamed = [error for error in worst_by_layer(errors).values() if error.score > 1]
    return sorted(blamed, key=lambda error: -error.score)


def worst_by_layer(errors: Sequence[LayerError]) -> Mapping[str, LayerError]:
    """Return the error of every layer with the largest score."""
    worst: dict[str, LayerError] = {}
    for error in errors:
        before = worst.get(error.name.layer)
        if before is None or error.score > before.score:
            worst[error.name.layer] = error
    return worst
