"""Likely causes of differences, among the causes that CANN's documents list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

from pipeline.core.files.value_text import align_columns
from pipeline.inspect.compare.forced_layers import ForcedComparison
from pipeline.inspect.compare.layer_errors import find_worst_by_layer
from pipeline.inspect.compare.tensor_rows import TensorRow
from pipeline.inspect.dumps.tensor_names import LOSS

GAIN = 4.0
"""Ratio of output error to input error above which a layer counts as an amplifier."""
MIN_DISTANCE = 1e-6
"""Relative Euclidean distance up to which an input error is ignored."""
WEAK = 1000.0
"""Ratio of error to expected error below which a layer counts as inaccurate, not as wrong."""
MAX_NAMED_LAYERS = 3
MAX_LISTED_LAYERS = 12


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
