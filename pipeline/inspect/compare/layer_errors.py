"""Error of each single layer, and the error that its type explains.

Both sides compute every layer from the inputs of the reference's layers, forward and backward. The
error is the distance from the reference's layers in float64. The expected error is the error of the
reference's layers with the plainest lowerings, in the types of the examined side. PyTorch's
`torch._dynamo.utils.same` compares an error with the reference's rounding in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nan, prod, sqrt
from statistics import median

import jax.numpy as jnp
import numpy as np

from pipeline.inspect.compare.accuracy_columns import compute_norm
from pipeline.inspect.dumps.layer_programs import LayerTensors
from pipeline.inspect.dumps.tensor_names import OUTPUT_ROLES, TensorName, named_tensors

FACTOR = 2.0
"""Multiple of the expected error above which a 16-bit error is a finding. Both sides round at the
same places."""
FACTOR_FLOAT32 = 3.0
"""The same multiple for float32, where the sides round sums in another order."""
FACTOR_WINOGRAD = 12.0
"""The same multiple for convolutions of a side with Winograd's formulas, whose sums before and
after the products lose digits. Errors of 3.9 and 4.5 times the expected error were measured."""
PATTERN = 12.0
"""Multiple of the expected variance ratio above which a 16-bit error is a finding."""
FEW = 6.0
"""Constant of 1 + FEW / sqrt(n), by which the factors grow for n elements."""
PATTERN_SIZE = 256
"""Least number of elements whose error may have a pattern."""
MAX_EXCUSE = 3.0
"""Largest `LayerError.excused`."""
MIN_ROUNDING = 0.25
"""Relative error, in units of rounding, that any result may have: about half of the error from
rounding each element once."""


@dataclass(frozen=True)
class LayerError:
    """The error of one tensor that a layer returns."""

    name: TensorName
    kind: str
    dtype: str
    size: int
    error: float
    """Relative Euclidean distance from the layer's result in float64."""
    expected: float
    """Distance that the type explains."""
    pattern: float
    """Ratio of variances, as `measure_pattern` returns it; about 1 for rounding."""
    expected_pattern: float
    excused: float = 1.0
    """Median ratio of other layers of the same kind, by which the ratio is divided."""
    has_winograd: bool = False
    """Whether it is a convolution of a side with Winograd's formulas."""
    misshapen: str = ""
    """Shapes of both sides; "" if they are equal."""

    @property
    def ratio(self) -> float:
        if self.misshapen:
            return inf
        if self.expected > 0:
            return self.error / self.expected
        return inf if self.error else 0.0

    @property
    def score(self) -> float:
        """Score of the error; above 1 the tensor is a finding."""
        if not np.isfinite(self.ratio):
            return inf
        is_narrow = self.dtype in ("float16", "bfloat16")
        factor = FACTOR if is_narrow else FACTOR_FLOAT32
        factor = FACTOR_WINOGRAD if self.has_winograd else factor
        score = self.ratio / self.excused / (factor * (1 + FEW / sqrt(self.size)))
        # An error that is far below the expected error may have any pattern.
        if is_narrow and self.size >= PATTERN_SIZE and self.ratio > 0.5:
            score = max(score, self.pattern / max(self.expected_pattern, 1.0) / PATTERN)
        return score

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


def measure_layer_errors(
    examined: LayerTensors,
    expected: Sequence[LayerTensors],
    wide: LayerTensors,
    captured: LayerTensors,
    *,
    has_winograd: bool,
) -> list[LayerError]:
    """Return the errors of all tensors that layers return, in the order of the layers.

    `examined` are tensors of the examined side, `wide` of the reference in float64, and `expected`
    of the reference in the examined side's types, whose largest error is the expected error. All
    read inputs from `captured`. `has_winograd` is whether the examined side uses Winograd.
    """
    examined_arrays, wide_arrays, *expected_arrays = (
        {
            name: array
            for name, array in named_tensors(tensors, {})
            if name.role in OUTPUT_ROLES and array.size
        }
        for tensors in (examined, wide, *expected)
    )
    errors = []
    for name, exact in wide_arrays.items():
        array = examined_arrays.get(name)
        if array is None:
            continue
        form = examined.forms.get(name.layer)
        kind = "loss" if form is None else form.kind
        dtype = "float32" if form is None else form.dtype
        min_norm = _compute_unit(dtype) * _compute_norm_of_terms(name, exact, captured)
        references = [
            by_name[name]
            for by_name in expected_arrays
            if name in by_name and by_name[name].shape == exact.shape
        ]
        is_winograd = has_winograd and kind == "conv"
        size = int(exact.size)
        error = LayerError(name, kind, dtype, size, nan, 0.0, nan, nan, has_winograd=is_winograd)
        errors.append(_measure_error(error, array, exact, references, min_norm))
    return _excuse_similar(errors)


def _measure_error(
    error: LayerError,
    array: np.ndarray,
    exact: np.ndarray,
    references: Sequence[np.ndarray],
    min_norm: float,
) -> LayerError:
    """Fill in the figures of `error`: the error of `array`, and the expected error.

    `references` are the reference's results in the examined types. `min_norm` is a lower bound of
    the expected error's norm.
    """
    if array.shape != exact.shape:
        return replace(error, misshapen=f"shape {array.shape}, not {exact.shape}")
    unit = _compute_unit(error.dtype)
    if not np.isfinite(array).all():
        distance = inf if np.isfinite(exact).all() else 0.0
        return replace(error, error=distance, expected=unit, pattern=1.0, expected_pattern=1.0)
    exact_norm = compute_norm(exact)
    errors = [compute_norm(reference - exact) for reference in references]
    expected_norm = max([*errors, MIN_ROUNDING * unit * exact_norm, min_norm])
    relative = 1 / exact_norm if exact_norm > 0 else 1.0
    patterns = [measure_pattern(reference - exact) for reference in references]
    return replace(
        error,
        error=compute_norm(array - exact) * relative,
        expected=expected_norm * relative,
        pattern=measure_pattern(array - exact),
        expected_pattern=max(patterns, default=1.0),
    )


def _compute_unit(dtype: str) -> float:
    """Return the largest relative error of rounding to a type; 0 for int32 and bool."""
    return float(jnp.finfo(dtype).eps) / 2 if dtype not in ("int32", "bool") else 0.0


def _compute_norm_of_terms(name: TensorName, exact: np.ndarray, captured: LayerTensors) -> float:
    """Return the norm of all terms that a parameter's gradient sums; 0 for other tensors.

    The rounding errors of the terms remain even if the terms cancel. For a kernel the norm is
    |cotangent| |inputs| sqrt(positions of the kernel / rows), as if both were independent.
    """
    cotangent = captured.output_gradients.get(name.layer)
    inputs = captured.inputs.get(name.layer)
    if name.role != "gradient" or cotangent is None or inputs is None:
        return 0.0
    if exact.ndim == 1:
        return compute_norm(cotangent)
    rows = max(1, prod(inputs.shape[:-1]))
    return compute_norm(cotangent) * compute_norm(inputs) * sqrt(prod(exact.shape[:-2]) / rows)


def measure_pattern(error: np.ndarray) -> float:
    """Return the ratio of the variance between rows to the variance within rows.

    Rows are samples or channels, and the larger ratio is returned. It is the F ratio of a one-way
    analysis of variance: about 1 if errors are independent.
    """
    if error.ndim < 2 or error.size < PATTERN_SIZE:
        return 1.0
    by_sample = error.reshape(error.shape[0], -1)
    by_channel = error.reshape(-1, error.shape[-1]).T
    return max(_compute_variance_ratio(by_sample), _compute_variance_ratio(by_channel))


def _compute_variance_ratio(rows: np.ndarray) -> float:
    count, size = rows.shape
    if count < 2 or size < 2:
        return 1.0
    means = rows.mean(axis=1)
    between_variance = size * float(np.square(means - means.mean()).sum()) / (count - 1)
    within_variance = float(np.square(rows - means[:, None]).sum()) / (count * (size - 1))
    return between_variance / within_variance if within_variance > 0 else 1.0


def _excuse_similar(errors: Sequence[LayerError]) -> list[LayerError]:
    """Set `excused` to the median ratio of other layers of the kind, if there are at least three.

    A lowering that adds in another order has larger errors in all its layers.
    """
    by_kind: dict[tuple[str, str, str], list[LayerError]] = {}
    for error in errors:
        by_kind.setdefault(_get_kind(error), []).append(error)
    result = []
    for error in errors:
        ratios = [other.ratio for other in by_kind[_get_kind(error)] if other is not error]
        if len(ratios) >= 3 and np.isfinite(median(ratios)):
            error = replace(error, excused=min(max(1.0, median(ratios)), MAX_EXCUSE))
        result.append(error)
    return result


def _get_kind(error: LayerError) -> tuple[str, str, str]:
    return error.kind, error.dtype, error.name.role


def find_worst_by_layer(errors: Sequence[LayerError]) -> Mapping[str, LayerError]:
    """Return the error with the largest score of each layer, by path."""
    worst: dict[str, LayerError] = {}
    for error in errors:
        current = worst.get(error.name.layer)
        if current is None or error.score > current.score:
            worst[error.name.layer] = error
    return worst
