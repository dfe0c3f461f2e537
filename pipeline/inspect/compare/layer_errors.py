"""Errors of single layers, the errors that their types explain, and likely causes.

The examined side's layers compute from the reference's inputs. Causes are those that CANN's
documents list.

Both sides compute every layer from the inputs of the reference's layers, forward and backward. The
error is the distance from the reference's layers in float64. The expected error is the error of the
reference's layers with the plainest lowerings, in the types of the examined side. PyTorch's
`torch._dynamo.utils.same` compares an error with the reference's rounding in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isnan, nan, prod, sqrt
from statistics import median
from typing import Any

import jax.numpy as jnp
import numpy as np

from pipeline.core.files.value_text import align_columns
from pipeline.inspect.compare.tensor_rows import TensorRow, compute_norm
from pipeline.inspect.dumps.dump_files import LOSS, OUTPUT_ROLES, TensorName, named_tensors
from pipeline.inspect.dumps.dump_step import CapturedStep, StepPass, join_passes
from pipeline.inspect.dumps.layer_programs import LayerPrograms, LayerTensors, Weights

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
GAIN = 4.0
"""Ratio of output error to input error above which a layer counts as an amplifier."""
MIN_DISTANCE = 1e-6
"""Relative Euclidean distance up to which an input error is ignored."""
WEAK = 1000.0
"""Ratio of error to expected error below which a layer counts as inaccurate, not as wrong."""
MAX_NAMED_LAYERS = 3
MAX_LISTED_LAYERS = 12


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


@dataclass(frozen=True)
class ForcedComparison:
    """Errors of the layers of a side."""

    errors: Sequence[LayerError]

    @property
    def findings(self) -> tuple[LayerError, ...]:
        """The worst error of each layer that has a finding, the largest score first."""
        blamed = [error for error in find_worst_by_layer(self.errors).values() if error.score > 1]
        return tuple(sorted(blamed, key=lambda error: -error.score))


@dataclass
class ReferenceStep:
    """A step of the reference, with which other sides are compared layer by layer."""

    programs: LayerPrograms
    step: CapturedStep
    _wide: LayerTensors | None = None
    """Results in float64."""
    _expected: dict[Any, LayerTensors] = field(default_factory=dict)
    """Results by types and loss scale."""

    def compare(self, examined: LayerPrograms, weights: Weights | None = None) -> ForcedComparison:
        """Compute each layer of `examined` from the reference's inputs, and return the errors.

        `weights` are the examined side's weights, if they differ from the reference's. The expected
        error is always computed with the reference's weights.
        """
        network = examined.config.network
        reference_network = self.programs.config.network
        loss_scale = None if weights is None else weights.loss_scale
        forced = self._compute_passes(examined.compute_forced, weights, loss_scale)
        expected = [self.expected_in(network, loss_scale)]
        if (network.dtype, network.rules) == (reference_network.dtype, reference_network.rules):
            expected.append(self.step.merge_passes())
        lowerings = getattr(network.policy, "chosen", ())
        errors = measure_layer_errors(
            forced,
            expected,
            self.compute_float64(),
            self.step.merge_passes(),
            has_winograd=any(lowering.family.startswith("winograd") for _, lowering in lowerings),
        )
        return ForcedComparison(errors)

    def compute_float64(self) -> LayerTensors:
        """Return the layers' results in float64, computed once."""
        if self._wide is None:
            network = self.programs.config.network.clone(dtype="float32", rules=())
            compute = self.programs.with_types_of(network).compute_forced
            self._wide = self._compute_passes(partial(compute, wide=True))
        return self._wide

    def expected_in(self, network: Any, loss_scale: Any = None) -> LayerTensors:
        """Return the reference's results in the types of `network`, with `loss_scale`; cached."""
        key = network.dtype, network.rules, None if loss_scale is None else float(loss_scale)
        if key not in self._expected:
            compute = self.programs.with_types_of(network).compute_forced
            self._expected[key] = self._compute_passes(compute, None, loss_scale)
        return self._expected[key]

    def _compute_passes(
        self,
        compute: Callable[..., LayerTensors],
        weights: Weights | None = None,
        loss_scale: Any = None,
    ) -> LayerTensors:
        """Compute all portions with `weights`, or the reference's weights if None."""

        def compute_pass(step_pass: StepPass) -> LayerTensors:
            # Weights of the reference's passes have the batch statistics after earlier passes.
            pass_weights = step_pass.weights
            if weights is not None and weights.params is not self.step.passes[0].weights.params:
                pass_weights = weights
            if loss_scale is not None:
                pass_weights = replace(pass_weights, loss_scale=loss_scale)
            return compute(pass_weights, step_pass.portion, step_pass.tensors)

        shards = [
            [compute_pass(step_pass) for step_pass in microbatches]
            for microbatches in self.step.shards
        ]
        parts = [tensors for shard in shards for tensors in shard]
        return join_passes(parts, [shard[-1].statistics for shard in shards])


def list_hints(rows: Sequence[TensorRow], forced: ForcedComparison | None) -> list[str]:
    """Return a line for every likely cause; `forced` is None if single layers weren't compared."""
    hints = []
    unpaired = [row for row in rows if row.left is None or row.right is None]
    if unpaired:
        hints.append(
            f"op fusion or constant folding: {len(unpaired)} tensors have no counterpart (*); "
            "--map LEFT:RIGHT+RIGHT names those that belong together"
        )
    mixed_dtypes = [row.dtypes for row in rows if len(set(row.dtypes)) > 1]
    if any("int8" in dtype for dtypes in mixed_dtypes for dtype in dtypes):
        hints.append("int8: a side is quantized, with an error of half a step of its scale")
    gains = find_amplifiers(rows)
    if gains:
        amplified = ", ".join(
            f"{layer} {gain:,.1f} times" for layer, gain in list(gains)[:MAX_NAMED_LAYERS]
        )
        hints.append(f"amplifier structures: errors of inputs grow in {amplified}")
    weak = [] if forced is None else [item for item in forced.findings if item.ratio < WEAK]
    if weak:
        layers = ", ".join(error.name.layer for error in weak[:MAX_NAMED_LAYERS])
        hints.append(f"weak accuracy of an operator: {layers}")
    return hints


def find_amplifiers(rows: Sequence[TensorRow]) -> list[tuple[str, float]]:
    """Return (layer, factor) for layers that amplify their input's error, the largest first."""
    errors: Mapping[tuple[str, str], float] = {
        (row.left.layer, row.left.role): row.columns.relative_euclidean
        for row in rows
        if row.left is not None and not isnan(row.columns.relative_euclidean)
    }
    gains = []
    for (layer, role), error in errors.items():
        input_error = errors.get((layer, "input"), 0.0)
        if role == "output" and input_error > MIN_DISTANCE and error > GAIN * input_error:
            gains.append((layer, error / input_error))
    return sorted(gains, key=lambda gain: -gain[1])


def format_layers(forced: ForcedComparison) -> list[str]:
    """Return a table of the layers with the largest scores; `!` marks findings."""
    # Of the loss, only the gradient is listed.
    errors = [e for e in forced.errors if e.name.layer != LOSS or e.name.role == "input_gradient"]
    worst = sorted(find_worst_by_layer(errors).values(), key=lambda error: -error.score)
    blamed_layers = {finding.name.layer for finding in forced.findings}
    table = [("Layer", "Kind", "Type", "Tensor", "Error", "Expected", "Ratio", "Pattern")]
    table += [
        (
            error.name.layer,
            error.kind,
            error.dtype,
            error.name.tensor_index,
            f"{error.error:.3g}",
            f"{error.expected:.3g}",
            f"{error.ratio:.3g}",
            f"{error.pattern:.3g}",
        )
        for error in worst[:MAX_LISTED_LAYERS]
    ]
    lines = zip(table, align_columns(table, right=range(4, 8)), strict=True)
    return [f"{'!' if row[0] in blamed_layers else ' '} {line}".rstrip() for row, line in lines]
