"""Labels per second and the utilisation of the processor, as columns of metrics.jsonl.

The model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B) counts the operations of the
forward pass three times: once, and twice for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import PositiveFloat

from pipeline.core.registry import component
from pipeline.training.features.common_features import LabelCount
from pipeline.training.features.feature_spec import FeatureContext, FeatureSpec
from pipeline.training.step_feature import StepFeature

if TYPE_CHECKING:
    from jax import Array

    from pipeline.training.state import Gradients, TrainState
    from pipeline.training.telemetry import StepOutcome, Telemetry

PRODUCT_SIZE = 1024
"""Rows and columns of the matrices whose product measures the peak."""
PEAK_S = 0.2
"""Seconds of that measurement."""


@component("feature")
class ThroughputSpec(FeatureSpec):
    """Records the valid labels of a step, the labels per second, and the model FLOPs utilisation.

    Both rates are of the steps that one dispatch computed. The peak is `peak_tflops`, or else that
    of a float32 matrix product, which is measured once.
    """

    name: Literal["throughput"] = "throughput"
    peak_tflops: PositiveFloat | None = None

    def build(self, context: FeatureContext) -> StepFeature:
        return Throughput(3 * context.count_flops(), self.peak_tflops)


@dataclass(frozen=True)
class Throughput(LabelCount):
    """Counts the valid labels of each step."""

    name: ClassVar[str] = "throughput"
    flops: float
    """Operations of a step."""
    peak_tflops: float | None
    columns: tuple[str, ...] = ("labels",)

    def make_columns(
        self, state: TrainState, gradients: Gradients, outcome: StepOutcome
    ) -> tuple[Array, ...]:
        return (gradients.sums[self.name],)

    def measure(self, telemetry: Telemetry, seconds: float) -> Mapping[str, np.ndarray]:
        labels = telemetry.columns["labels"]
        peak = measure_peak() if self.peak_tflops is None else 1e12 * self.peak_tflops
        used = self.flops * len(telemetry) / seconds / peak
        rates = {"labels_per_s": labels.sum() / seconds, "model_flops_utilisation": used}
        return {name: np.full(len(telemetry), rate, np.float32) for name, rate in rates.items()}


@cache
def measure_peak() -> float:
    """Return the FLOP/s of a float32 matrix product on the default device."""
    import jax
    import jax.numpy as jnp

    from pipeline.core.host.shortest_time import measure_shortest_s

    matrix = jnp.ones((PRODUCT_SIZE, PRODUCT_SIZE), jnp.float32)
    seconds = measure_shortest_s(jax.jit(jnp.dot), matrix, matrix, budget_s=PEAK_S)
    return float(2 * PRODUCT_SIZE**3 / seconds)
