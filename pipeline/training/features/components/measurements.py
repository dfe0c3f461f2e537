"""Features that measure a step: the gradient noise scale, labels per second, utilisation.

The gradient noise scale of a layer is the batch size beyond which larger batches gain little
(McCandlish et al., An empirical model of large-batch training, 2018, arXiv 1812.06162, appendix A).
Squared norms of the gradients of parts of the batch and of the whole batch give unbiased estimates
of |G|^2 and of the trace S of the covariance of a sample's gradient. The noise scale is S / |G|^2.

The model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B) counts the operations of the
forward pass three times: once, and twice for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveFloat

from pipeline.core.registry import component
from pipeline.training.features.averages import LabelCount
from pipeline.training.parallel.parallel_spec import count_shards
from pipeline.training.step_feature import FeatureContext, FeatureSpec, StepFeature

if TYPE_CHECKING:
    from jax import Array

    from pipeline.training.forward_pass import ForwardPass
    from pipeline.training.state import Gradients, TrainState
    from pipeline.training.telemetry import StepOutcome, Telemetry

ALL = "all"
PRODUCT_SIZE = 1024
"""Rows and columns of the matrices whose product measures the peak."""
PEAK_S = 0.2
"""Seconds of that measurement."""


@component("feature")
class GradientNoiseSpec(FeatureSpec):
    """Records the noise scale of all trained parameters, and of each layer. Both estimates are
    averaged over steps with `decay`. The parts of a batch are microbatches or shards."""

    name: Literal["gradient_noise"] = "gradient_noise"
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.99

    def check(self, recipe: Any) -> Iterator[str]:
        if not _splits_batch(recipe):
            yield (
                "train.accumulate_steps = 1: must be above 1 with train.features.gradient_noise, "
                "which compares microbatches with the batch; or parallel.mode must be data, with "
                "several shards"
            )

    def build(self, context: FeatureContext) -> StepFeature:
        layers = (ALL, *context.params)
        return GradientNoise(self.decay, tuple(f"noise_scale/{layer}" for layer in layers))


def _splits_batch(recipe: Any) -> bool:
    """Return whether the gradients of a batch are computed in parts."""
    parallel = recipe.parallel
    if recipe.train.accumulate_steps > 1:
        return True
    if not parallel.is_data_parallel:
        return False
    if parallel.reproducible in (None, "exact"):
        return count_shards(parallel, recipe.train.batch_size) > 1
    # A launcher starts processes, whose number isn't in the recipe, each with a device.
    return parallel.num_devices > 1 or recipe.launch.name != "none"


@dataclass(frozen=True)
class GradientNoise(StepFeature):
    """Estimates the noise scales. Its state has the averages by layer, {layer: (S, |G|^2)}, float32
    (). They start at 0, which cancels in the ratio."""

    name: ClassVar[str] = "gradient_noise"
    decay: float
    columns: tuple[str, ...]

    def init(self, trained: Any) -> Any:
        import jax.numpy as jnp

        return {layer: (jnp.float32(0), jnp.float32(0)) for layer in self._layers}

    @property
    def _layers(self) -> list[str]:
        return [column.partition("/")[2] for column in self.columns]

    def sum_part(self, forward: ForwardPass, values: Any) -> Any:
        """Return the squared norms of a part's gradients by layer, the number 1, and the number of
        the part's samples."""
        import jax
        import jax.numpy as jnp

        samples = forward.batch.mask.sum().astype(jnp.float32)
        shards = forward.config.shards
        if shards is not None and shards.factor != 1:  # The sum over shards is multiplied by it.
            values = jax.tree.map(lambda g: g * shards.factor, values)
        return self._square(values), jnp.float32(1), samples

    def make_columns(
        self, state: TrainState, gradients: Gradients, outcome: StepOutcome
    ) -> tuple[Array, ...]:
        averages = self._average(state, gradients, state.features["loss_scale"].scale)
        return tuple(noise / signal for noise, signal in averages.values())

    def change_update(
        self, before: TrainState, after: TrainState, gradients: Gradients, count: Array | int
    ) -> TrainState:
        return after.replace_part(self.name, self._average(before, gradients, 1.0))

    def _average(
        self, state: TrainState, gradients: Gradients, scale: Array | float
    ) -> dict[str, tuple[Array, Array]]:
        """Return the averages with a step's estimates. `gradients.values` are of the loss times
        `scale`."""
        part_scale = state.features["loss_scale"].scale
        part_squares, parts, samples = gradients.sums[self.name]
        squares = self._square(gradients.values)
        averages = {}
        for layer, (noise, signal) in state.features[self.name].items():
            # A part's gradients are its share of the mean: 1 / parts of the gradients of its mean.
            small = parts * part_squares[layer] / part_scale**2
            large = squares[layer] / scale**2
            share = (1 - self.decay) / (parts - 1)
            averages[layer] = (
                self.decay * noise + share * samples * (small - large),
                self.decay * signal + share * (parts * large - small),
            )
        return averages

    def _square(self, values: Any) -> Mapping[str, Array]:
        """Return the squared norms of gradients by layer; 0 for a layer that isn't trained."""
        import jax
        import jax.numpy as jnp

        squares = {layer: jnp.float32(0) for layer in self._layers}
        for layer, tree in values.items():
            for leaf in jax.tree.leaves(tree):
                squares[layer] += jnp.square(leaf).sum()
        squares[ALL] = sum(squares[layer] for layer in values)
        return squares


@component("feature")
class ThroughputSpec(FeatureSpec):
    """Records the valid labels of a step, the labels per second, and the model FLOPs utilisation.

    Both rates are of the steps that one dispatch computed. The peak is `peak_tflops`, of all
    devices together, or else the FLOP/s of a float32 matrix product on one device, which is
    measured once.
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

    from pipeline.core.host.measured_time import measure_shortest_s

    matrix = jnp.ones((PRODUCT_SIZE, PRODUCT_SIZE), jnp.float32)
    seconds = measure_shortest_s(jax.jit(jnp.dot), matrix, matrix, budget_s=PEAK_S)
    return float(2 * PRODUCT_SIZE**3 / seconds)
