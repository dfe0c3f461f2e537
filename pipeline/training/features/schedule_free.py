"""Schedule-free averaging of an optimizer's iterates, which evaluations use.

Defazio et al., The road less scheduled, 2024 (arXiv 2405.15682).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.training.component_specs import IterateAverage
from pipeline.training.features.common_features import EVALUATED, EvaluatedWeights
from pipeline.training.state import TrainState, merge_params, select_averaged
from pipeline.training.telemetry import count_updates


@dataclass(frozen=True)
class ScheduleFree(EvaluatedWeights):
    """The paper's sequences: x is averaged for evaluations, z is what the optimizer moves, and
    gradients are taken at y, which the parameters are.

    Its state is {"evaluated": x, "moved": z, "max_rate": the largest learning rate so far,
    "weight": the sum of the weights of all updates}; the last two are float32 ().
    """

    name: ClassVar[str] = "schedule_free"
    rule: IterateAverage

    def init(self, trained: Any) -> dict[str, Any]:
        zero = jnp.float32(0)
        moved = jax.tree.map(jnp.copy, trained)
        return {**super().init(trained), "moved": moved, "max_rate": zero, "weight": zero}

    def move_parameters(
        self, before: TrainState, after: TrainState, rates: Array | float
    ) -> TrainState:
        part = before.features[self.name]
        max_rate = jnp.maximum(part["max_rate"], jnp.ravel(jnp.asarray(rates, jnp.float32))[0])
        number = count_updates(before).astype(jnp.float32) + 1
        weight = number**self.rule.step_power * max_rate**self.rule.rate_power
        total = part["weight"] + weight
        share = jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), 0)

        moves = jax.tree.map(lambda new, old: new - old, after.params, before.params)
        moved = jax.tree.map(jnp.add, part["moved"], select_averaged(part["moved"], moves))
        average = jax.tree.map(lambda x, z: x + share * (z - x), part[EVALUATED], moved)
        params = jax.tree.map(lambda x, z: z + self.rule.b1 * (x - z), average, moved)
        after = replace(after, params=merge_params(after.params, params))
        part = {EVALUATED: average, "moved": moved, "max_rate": max_rate, "weight": total}
        return after.replace_part(self.name, part)
