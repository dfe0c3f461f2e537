"""The moving average of the trained parameters, which evaluations use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.training.component_specs import AverageSpec
from pipeline.training.features.common_features import EVALUATED, WeightCopy
from pipeline.training.state import Gradients, TrainState, merge_params, select_averaged
from pipeline.training.telemetry import count_updates

AVERAGE = "average"


@dataclass(frozen=True)
class MovingAverage(WeightCopy):
    """An exponential moving average of the trained parameters. Its state is the average."""

    name: ClassVar[str] = AVERAGE
    spec: AverageSpec

    def change_update(
        self, before: TrainState, after: TrainState, gradients: Gradients, count: Array | int
    ) -> TrainState:
        average = before.features[AVERAGE]
        params = select_averaged(average, after.params)
        updated = update_ema(average, params, self.spec, count_updates(before))
        return after.replace_part(AVERAGE, updated)

    def change_weights(self, state: TrainState, params: Any) -> Any:
        return merge_params(params, state.features[AVERAGE])


def update_ema(average: Any, params: Any, spec: AverageSpec, updates: Array) -> Any:
    """Return the moving average after an update. `updates`, int32 (), is the number of updates
    before it."""
    assert spec.decay is not None, "callers have an average, so its decay is set"
    count = updates.astype(jnp.float32)
    ramp = (1 + count) / (10 + count)
    decay = jnp.minimum(spec.decay, ramp) if spec.warmup else jnp.float32(spec.decay)
    return jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), average, params)


def find_evaluated(features: Mapping[str, Any]) -> Any:
    """Return the trained parameters that evaluations use, from the states of features; None if they
    use those of the training."""
    parts = [part for name, part in features.items() if name != AVERAGE and isinstance(part, dict)]
    evaluated = [part[EVALUATED] for part in parts if EVALUATED in part]
    return evaluated[0] if evaluated else features.get(AVERAGE)
